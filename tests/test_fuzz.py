"""Generators of trouble, smaller than those that found what `test_loud` guards. `FUZZ=10 pytest tests/test_fuzz.py`
draws ten times as many."""
import matplotlib.pyplot as plt, numpy as np, os, pytest, random, re, sys, torch, warnings
from fractions import Fraction
from functools import partial
from torch import nn
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelStepException,
    CancelTrainException)
from fastai.callback.schedule import SchedCos
from fastai.callback.training import GradientClip
from fastai.optimizer import Adam, Lamb, OptimWrapper, RAdam, RMSProp, SGD
import fastaccum
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.core.macro_batch import round_up
from fastaccum.testing import CrossEntropy, assert_twins, deviation, toy, twins
from common import grads, weights
from test_faults import check_clean
from test_loud import Penalty, Tied

many = int(os.environ.get('FUZZ', 1))
def seeds(n): return pytest.mark.parametrize('seed', range(n*many))

# Optimizers, models, losses, and callbacks that change things in the middle of a fit

class AtEpoch(Callback):
    "Does `f` to the Learner when the second epoch begins"
    order = -20
    def __init__(self, f): self.f = f
    def before_epoch(self):
        if self.epoch==1: self.f(self.learn)

class AtSteps(Callback):
    "Raises `exc` at some of the optimizer's steps"
    run_valid = False
    def __init__(self, exc, order, every): self.exc,self.order,self.every,self.n = exc,order,every,0
    def before_step(self):
        self.n += 1
        if not self.n%self.every: raise self.exc

class Average(Callback):
    "The mean that `reduction='none'` leaves to a callback"
    order,run_valid = -101,False
    def after_loss(self): self.learn.loss_grad = self.loss_grad.mean()

class Noise(Callback):
    "Adds to the gradients of a step"
    order,run_valid = 20,False
    def before_step(self):
        for p in self.model.parameters():
            if p.grad is not None: p.grad.add_(0.01*p.detach().sin())

def mlp(): return nn.Sequential(nn.Linear(5,7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7,3)).double()
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn,self.head = nn.GRU(1, 4, batch_first=True),nn.Linear(4,3)
    def forward(self, x): return self.head(self.rnn(x[...,None])[0][:,-1])

opts = [partial(SGD, mom=0.9), partial(SGD, mom=0.5, wd=0.1), Adam, partial(Adam, decouple_wd=False), RAdam,
    partial(RMSProp, mom=0.9), Lamb,
    *(partial(OptimWrapper, opt=o) for o in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax,
        partial(torch.optim.SGD, nesterov=True, momentum=0.5)))]
models = [mlp, lambda: Tied().double(), lambda: Recurrent().double()]
w = torch.tensor([0.3,1.,4.]).double()
losses = [CrossEntropy, partial(CrossEntropy, weight=w), partial(CrossEntropy, label_smoothing=0.1),
          partial(CrossEntropy, ignore_index=1),
          partial(CrossEntropy, reduction='sum'), partial(CrossEntropy, reduction='none'), nn.MultiMarginLoss]
def change(nm, value): return lambda l: setattr(l.loss_func, nm, value)
alterations = [lambda l: l.opt.set_hyper('lr', 0.003), lambda l: l.opt.set_hyper('wd', 0.2),
    change('weight', w.flip(0)), change('ignore_index', 2),
    lambda l: l.model.head.requires_grad_(False) if hasattr(l.model, 'head') else None,
    lambda l: setattr(l, 'loss_func', CrossEntropy(label_smoothing=0.3))]

def draw(seed):
    r = random.Random(seed)
    loss,model,micro = r.choice(losses),r.choice(models),r.randint(1, 7)
    l = loss()
    alter = alterations[:2] if isinstance(l, nn.MultiMarginLoss) else alterations
    summed,none = (getattr(l, 'reduction', '')==o for o in ('sum','none'))
    extra = [[partial(GradientClip, r.choice([0.05,0.5]))],
        [partial(Penalty, 'preds' if summed else 'weights', r.random()<0.5)],
        [Noise],
        [partial(AtEpoch, r.choice(alter[:-1] if summed or none else alter))],
        [partial(AtSteps, CancelStepException, r.choice([3,7,12]), r.randint(2, 5))]]
    extra = [o for o in extra if r.random()<0.3]
    def cbs(): return [o[0]() for o in extra]+([Average()] if none else [])
    lr = 1e-3 if summed else r.choice([1e-2,3e-2])
    def fit(learn, cbs):
        for how in r2.choices(['fit','fit_one_cycle','fit_flat_cos'], k=2): getattr(learn, how)(2, lr, cbs=cbs)
    r2 = random.Random(seed)
    def seeded(learn, cbs):
        r2.seed(seed)
        fit(learn, cbs)
    altered = any(o[0].func is AtEpoch for o in extra if hasattr(o[0], 'func'))
    may = model is mlp and getattr(l, 'ignore_index', 0)==-100 and not (none or altered)
    return dict(micro=micro, macro=r.randint(micro, 30), n=r.randint(40, 80), seed=seed, opt_func=r.choice(opts),
        loss_func=l, model=model, fit=seeded, tokens=may and r.random()<0.5,
        splitter=lambda m: [list(m.parameters())], cbs=cbs)

@seeds(120)
def test_random_twins(seed):
    cfg = draw(seed)
    loss = cfg.pop('loss_func')
    def make(*args, **kwargs):
        import copy
        return toy(*args, loss_func=copy.deepcopy(loss), **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        a,b = twins(make=make, **cfg)
    for o in (a,b): o.recorder.values = [v[:1] for v in o.recorder.values]
    assert_twins(a, b, tol=1e-6)

# Cancel* exceptions anywhere: what is the gradient at each step?

class Chaos(Callback):
    "Raises at random events"
    run_valid = False
    def __init__(self, rng, order):
        self.rng,self.order = rng,order
        excs = dict(before_batch=[CancelBatchException], after_pred=[CancelBatchException],
            after_loss=[CancelBatchException],
            before_backward=[CancelBackwardException,CancelBatchException], after_backward=[CancelBatchException],
            before_step=[CancelStepException,CancelBatchException],
            after_step=[CancelBatchException], after_batch=[CancelTrainException])
        for nm,some in excs.items(): setattr(self, nm, partial(self.perhaps, some, 0.01 if nm=='after_batch' else 0.06))
    def perhaps(self, excs, p):
        if self.training and self.rng.random()<p: raise self.rng.choice(excs)

class Backward(Callback):
    "Which micro-batches the backward pass has run on"
    order,run_valid = -1000,False
    def before_fit(self): self.xs,self.ys,self.left,self.done = [],[],None,False
    def before_train(self): self.before_fit()
    def before_batch(self):
        if self.done:   # since the last step
            self.left = grads(self.learn) if any(g is not None and g.any() for g in grads(self.learn)) else None
            self.xs,self.ys,self.done = [],[],False
    def before_backward(self): self.ran = True
    def after_cancel_backward(self): self.ran = False
    def after_backward(self):
        if self.ran: self.xs.append(self.x); self.ys.append(self.y)
        self.ran = False
    def expected(self):
        x,y = torch.cat(self.xs),torch.cat(self.ys)
        new = torch.autograd.grad(self.learn.loss_func(self.model(x), y), list(self.model.parameters()))
        return [g if o is None else g+o for g,o in zip(new, self.left or [None]*len(new))]

class AtStep(Callback):
    "Compares the gradient of each macro-batch that was completed, also where its step was cancelled"
    order,run_valid = -1000,False
    def __init__(self, backward): self.backward,self.offs = backward,[]
    def before_step(self): self.compare()
    def after_batch(self):
        if self.gradient_accumulation.stepped and not self.backward.done: self.compare()
    def compare(self):
        self.offs.append(deviation(self.backward.expected(), grads(self.learn)))
        self.backward.done = True

@seeds(60)
def test_random_cancellations(seed):
    r = random.Random(seed)
    backward = Backward()
    at_step,micro = AtStep(backward),r.randint(1, 6)
    learn = toy(micro, n=r.randint(40, 90), seed=seed, tokens=r.random()<0.5)
    order = r.choice([-11,-5,0,5,7,11,55,100])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(3, 0.05, cbs=[GradientAccumulation(r.randint(micro, 24)),backward,at_step,Chaos(r, order)])
    assert at_step.offs and max(at_step.offs)<1e-9, at_step.offs
    check_clean(learn)

# An interrupt at any bytecode of ours, and another while we clean up

package = os.path.dirname(fastaccum.__file__)

class Interrupts:
    "Raises KeyboardInterrupt at the given bytecodes of our frames, counted from 0"
    def __init__(self, *at): self.at,self.n,self.raised = set(at),0,0
    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(package): return None
        frame.f_trace_opcodes = True
        return self.local
    def local(self, frame, event, arg):
        if event!='opcode': return self.local
        self.n += 1
        if self.n-1 not in self.at: return self.local
        self.raised += 1
        raise KeyboardInterrupt
    def __enter__(self):
        self.old = sys.gettrace()
        sys.settrace(self)
        return self
    def __exit__(self, *_): sys.settrace(self.old)

def interrupted(seed, at, permanent=False, **kwargs):
    "A Learner whose accumulated fit was interrupted"
    acc,learn = GradientAccumulation(6, **kwargs),toy(2, n=14, seed=seed)
    learn.create_opt()
    if permanent: learn.add_cb(acc)
    its = Interrupts(*at)
    try:
        with its: learn.fit_one_cycle(1, 0.1, cbs=[] if permanent else acc)
    except KeyboardInterrupt: pass
    if acc in learn.cbs: learn.remove_cb(acc)   # a permanent one, or fastai was interrupted while it took callbacks off
    learn.remove_cbs([o for o in learn.cbs if type(o).__name__=='ParamScheduler'])
    return learn,its

@pytest.mark.parametrize('kwargs', [dict(), dict(micro_batch_size='auto'), dict(log_accum_batch=False)], ids=str)
@pytest.mark.parametrize('permanent', [False,True])
def test_interrupts(kwargs, permanent):
    total,r = interrupted(0, (), permanent, **kwargs)[1].n,random.Random(0)
    assert total>1000
    raised = 0
    for k in range(40*many):
        first = r.randrange(total)
        at = (first,first+r.randint(1, 60)) if k%2 else (first,)
        learn,its = interrupted(k, at, permanent, **kwargs)
        raised += its.raised
        check_clean(learn)
        fresh = toy(2, n=14, seed=k)
        fresh.model.load_state_dict(learn.model.state_dict())
        for o in (learn,fresh): o.fit_one_cycle(1, 0.01, reset_opt=True)
        assert_twins(fresh, learn)
    assert raised>=40*many

# Arguments that make no sense, and odd ones that do: either a message that helps, before a weight moves, or a right run

odd = [0, -1, 1, 3, 4, 64, 2.5, 1e400, float('nan'), True, False, None, '64', 'auto', 'step', [], {}, {0:2}, {'a':1},
    {-1:2}, {0:0}, {0:True}, {2:10**400}, {0:np.int8(64)}, np.int64(8), np.int8(64), np.uint8(200), np.float32(0.5),
    np.array(4), torch.tensor(8), torch.tensor([1.,2.]), Fraction(1, 2), 1+0j, 10**400, -10**400,
    lambda: 4, lambda l: 4, lambda a,b: a, lambda *a: 8, lambda p: None, lambda a,b: lambda p: 8,
    lambda a,b: lambda p: -1, lambda a,b,c: 4, len, print, object, dict]
base = dict(log_accum_batch=True, micro_batch_size=None, drop_last=None, size=None, sync_each=None)
accs = {GradientAccumulation: dict(accum_bs=16, n_acc=32)|base,
    GradientAccumulationSchedule:
        dict(start_accum_bs=8, final_accum_bs=24, start=0, finish=0.6, schedule=SchedCos)|base,
    GradientAccumulationScheduler: dict(scheduling={0:2, 1:3}, mode='epoch')|base}
find = dict(mode='power', steps_per_trial=2, init_val=2, max_trials=25, apply=False, show_plot=False, n_look=256)
params = [(f,nm) for f,d in (*accs.items(), ('bs_find',find)) for nm in (*d,'nothing_of_ours')]
remedies = re.compile(r'\b(give|pass|use|leave|lower|return)\b', re.I)

theirs = re.compile(r'has no len|is not iterable')   # what `len` and `dict`, called with a Learner, say themselves

def told(e, drawn):
    "Does the message name a parameter or a value that was drawn, and say what to do?"
    msg = str(e)
    if 'nothing_of_ours' in drawn: return 'unexpected keyword' in msg   # Python's own
    if any(v is o for v in drawn.values() for o in (len,dict)) and theirs.search(msg): return True
    return remedies.search(msg) and any(nm in msg or repr(v) in msg for nm,v in drawn.items())

def check_run(learn, f, drawn):
    "Train for an epoch with the arguments drawn; where there is a twin, the weights are the twin's"
    kwargs = {k:v for k,v in accs.get(f, find).items() if k!='n_acc'}|drawn
    if f=='bs_find':
        kept = weights(learn)
        learn.bs_find(**kwargs)
        assert torch.equal(kept, weights(learn))
        return learn.fit(1, 0.05)
    if 'n_acc' in drawn and 'accum_bs' not in drawn: del kwargs['accum_bs']
    learn.fit(1, 0.05, cbs=f(**kwargs))
    if f is not GradientAccumulation or kwargs['size'] is not None: return
    asked = kwargs.get('accum_bs')
    big = round_up(int(kwargs.get('n_acc', 32) if asked is None else asked), 4)
    twin = toy(big, whole=big if kwargs['drop_last'] else 1, n=50)
    twin.fit(1, 0.05)
    assert deviation(weights(twin), weights(learn))<1e-7

@seeds(150)
def test_arguments(seed):
    r = random.Random(seed)
    f,nm = params[seed%len(params)]
    for _ in range(1 if f=='bs_find' else 5):   # a search takes longest
        drawn = {nm:r.choice(odd)}
        if r.random()<0.5: drawn |= {r.choice([p for g,p in params if g==f]):r.choice(odd)}
        learn = toy(4, n=50)
        before = weights(learn)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try: check_run(learn, f, drawn)
            except (TypeError,ValueError,IndexError,AttributeError) as e:
                assert told(e, drawn), drawn
                assert torch.equal(before, weights(learn)), drawn
                continue
        plt.close('all')
        assert weights(learn).isfinite().all() and not torch.equal(before, weights(learn)), drawn
