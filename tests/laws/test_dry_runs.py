"`accum_check`, `accum_find` and `bs_find` restore all state of the Learner, even if interrupted."
import numpy as np, pytest, random, torch
from contextlib import contextmanager, nullcontext
from functools import partial
from torch import nn
from fastai.vision.all import (Adam, CSVLogger, Callback, DataLoader, DataLoaders, GradientClip, Learner, Metric,
    ParamScheduler, SaveModelCallback, ShortEpochCallback, TerminateOnNaNCallback)
from fastaccum import ActivationCheckpoint, GradientAccumulation, NoiseScale
from fastaccum.testing import toy
from common import CallAt, CpuMixedPrecision, LimitedMemory, RecordAt, pick_cases, runs_out_above, weights
from small_learners import all_params

# the three methods of a Learner that train for a moment and then restore everything
dry_runs = dict(accum_check=lambda learn, **kwargs: learn.accum_check(**kwargs),
    accum_find=lambda learn, **kwargs: learn.accum_find(show_plot=False, **dict(steps=2)|kwargs),
    bs_find=lambda learn, steps=3: learn.bs_find('binsearch', show_plot=False, steps_per_trial=steps))

def comparable(o, depth=0):
    "Return a form of `o` to be compared with `==`: its values if their type is known, or its id"
    if isinstance(o, torch.Tensor):
        grad = o.grad.tolist() if o.is_leaf and o.grad is not None else None
        return id(o),o.requires_grad,repr(o.detach().tolist()),repr(grad)
    if isinstance(o, torch.Generator): return repr(o.get_state().tolist())
    if isinstance(o, random.Random): return hash(o.getstate())
    if isinstance(o, (str,int,float,type(None),np.ndarray)): return repr(o)
    if isinstance(o, dict): return [(comparable(k, depth+1),comparable(v, depth+1)) for k,v in o.items()]
    if isinstance(o, (list,tuple)) or type(o).__name__=='L': return [comparable(x, depth+1) for x in o]
    skip = (type,nn.Module,Learner,DataLoaders,DataLoader)
    if depth>4 or not hasattr(o, '__dict__') or isinstance(o, skip) or callable(o): return id(o)
    return comparable(vars(o), depth+1)

def all_state(learn):
    "Return all state that a dry run may change, of everything that belongs to the Learner, and of torch"
    modules,opt = learn.model.named_modules(),learn.opt
    return dict(modules=[(nm,m.training,comparable(m._parameters),comparable(m._buffers),len(m._forward_hooks),
            len(m._forward_pre_hooks),sorted(vars(m))) for nm,m in modules],
        hooks=[len(p._backward_hooks or ()) for p in learn.model.parameters()],
        learn={k:comparable(v) for k,v in vars(learn).items() if k not in ('opt','recorder')},
        recorder=comparable(vars(learn.recorder)),
        cbs=[(id(o),comparable(vars(o)),o.order,o.run,o.run_train,o.run_valid) for o in learn.cbs],
        opt=opt and (id(opt),comparable([opt.state.get(p) for p in learn.model.parameters()]),
            comparable(list(opt.hypers))),
        loaders=[(id(o),comparable(vars(o)),len(o)) for o in learn.dls.loaders], grad=torch.is_grad_enabled(),
        rng=(hash(random.getstate()),repr(np.random.get_state()),repr(torch.get_rng_state().tolist())))

@contextmanager
def unchanged(learn):
    "Fail if `all_state` differs between the beginning and the end of this context"
    before = all_state(learn)
    yield
    now = all_state(learn)
    assert before.keys()==now.keys() and [k for k in before if before[k]!=now[k]]==[]

class Ema(Callback):
    "Keeps a moving average of the weights, which it changes in place"
    order,mean = 11,None
    def before_fit(self): self.mean = weights(self.learn) if self.mean is None else self.mean
    def after_step(self): self.mean.mul_(.9).add_(weights(self.learn), alpha=.1)

class Draws(Callback):
    "Draws random numbers, and changes attributes of itself, the Learner and the model in every batch"
    def __init__(self): self.notes,self.d,self.arr,self.rng = [],{},np.zeros(2),random.Random(3)
    def before_batch(self):
        for draw in (random.random,np.random.rand,lambda: torch.rand(1),self.rng.random): draw()
        self.notes.append(len(self.learn.xb[0]))
        self.d[len(self.d)] = [0]
        self.arr += 1
        self.run_valid = False
        self.learn.loss_func = partial(self.learn.loss_func)
        self.learn.logger = print
        self.learn.new = 1
        self.learn.model[0].register_forward_hook(lambda *o: None)
        self.learn.model[0].new = torch.zeros(1)
        self.learn.model[4].bias.requires_grad_(False)

class Count(Metric):
    def __init__(self): self.calls = []
    def reset(self): self.calls.append('reset')
    def accumulate(self, learn): self.calls.append(random.random())
    value = property(lambda self: float(len(self.calls)))

def learner_with_all_state(fitted=False, cbs=(), **kwargs):
    "Return a Learner with every kind of state that a dry run could change"
    def net():
        layers = nn.Linear(5, 6),nn.BatchNorm1d(6),nn.Dropout(.2),LimitedMemory(),nn.Linear(6, 3)
        return nn.Sequential(*layers).double()
    cbs = [Ema(),GradientClip(),GradientAccumulation(12),*cbs]
    learn = toy(12, n=60, model=net, splitter=all_params, shuffle=True, opt_func=Adam, metrics=Count(), cbs=cbs,
        **kwargs)
    if fitted:
        with learn.no_logging(): learn.fit(1, .1)
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    return learn

@pytest.mark.parametrize('method', dry_runs)
@pytest.mark.parametrize('fitted', [False,True])
@pytest.mark.parametrize('cap', [1000,5,1], ids=['success','memory','nothing fits'])
def test_everything_is_restored_after_success_and_after_running_out_of_memory(method, cap, fitted):
    "If memory runs out, all three raise an error, but `bs_find` only if not even one sample fits"
    more = [Draws(),CSVLogger('log.csv'),NoiseScale(every=1)][:3 if method=='accum_find' else 2]
    learn = learner_with_all_state(fitted, more)
    learn.model[3].runs_out = runs_out_above(cap, 'forward')
    fits = cap==1000 or (method,cap)==('bs_find',5)
    with unchanged(learn), nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
        dry_runs[method](learn, steps=2)

events = ('before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward '
    'before_step after_batch after_fit').split()

@pytest.mark.parametrize('method,event,at,exc', pick_cases(30, [*(('accum_check',e,i,x) for e in events for i in (1,2,4)
    for x in (KeyboardInterrupt,ZeroDivisionError)), *(('accum_find',e,1,KeyboardInterrupt) for e in events),
    *(('bs_find',e,i,x) for e in events for i in (1,4) for x in (KeyboardInterrupt,ZeroDivisionError))]))
def test_everything_is_restored_after_an_interrupt(method, event, at, exc):
    "The interrupt may come at any event, in any run of the method"
    heard = []
    def interrupt(learn):
        heard.append(1)   # a list outside of the callback, because dry runs restore its attributes
        if len(heard)==at: raise exc('planted')
    cb = CallAt(event, interrupt, run_valid=True)
    cb.order = -100
    learn = learner_with_all_state(cbs=[Draws(),cb])
    with unchanged(learn), pytest.raises(exc): dry_runs[method](learn)

@pytest.mark.parametrize('method', dry_runs)
@pytest.mark.parametrize('how', ['plain','mixed','within a fit','training metrics','checkpoint'])
def test_a_dry_run_does_not_change_later_training(method, how):
    def run(f):
        cbs = dict(mixed=[CpuMixedPrecision()], checkpoint=[ActivationCheckpoint(nn.Linear)])
        learn,todo = learner_with_all_state(cbs=cbs.get(how, [])),[f]
        # `f` itself sends `before_fit` again, so `todo` makes sure that `f` runs once
        within = RecordAt('before_fit', lambda l: todo and todo.pop()(l), order=70)
        random.seed(1)
        with learn.no_logging():
            if how=='training metrics':
                learn.recorder.train_metrics = True
                f(learn)   # before the first fit resets the training metrics
            learn.fit_one_cycle(1, .1)
            if how!='within a fit': f(learn)
            learn.fit_one_cycle(1, .1, cbs=[within] if how=='within a fit' else [])
        return learn
    a,b = run(lambda learn: 0),run(dry_runs[method])
    assert weights(a).equal(weights(b)) and a.ema.mean.equal(b.ema.mean)
    assert a.recorder.losses==b.recorder.losses and a.metrics[0].calls==b.metrics[0].calls

@pytest.mark.parametrize('method', dry_runs)
def test_nothing_is_logged_saved_validated_or_measured(method, tmp_path, capsys):
    heard,validates = [],Callback()
    validates.before_validate = lambda: heard.append('validated')
    schedule = ParamScheduler(dict(lr=lambda pct: heard.append('scheduled') or .1))
    learn = learner_with_all_state(cbs=[CSVLogger(tmp_path/'log.csv'),SaveModelCallback(fname='best'),
        TerminateOnNaNCallback(),ShortEpochCallback(.01),validates,schedule])
    learn.logger = lambda *o: heard.append('logged')
    dry_runs[method](learn)
    assert heard==learn.metrics[0].calls==[] and not list(tmp_path.iterdir()) and not hasattr(learn.recorder, 'lrs')
    assert capsys.readouterr().out==''
