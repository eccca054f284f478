"The batch size finder: the right answer, whatever fails and wherever, and a Learner that is as it was."
import copy, gc, os, random, subprocess, sys, weakref
from functools import partial
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger, ProgressCallback
from fastai.callback.schedule import ParamScheduler
from fastai.callback.tracker import SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import GradientClip, ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, Metric
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastcore.basics import noop
from fastaccum import GradientAccumulation
from fastaccum.bs_find import FoundSize, search, with_size
from fastaccum.memory.shortage import is_out_of_memory
from fastaccum.memory.snapshot import autocast_state
from fastaccum.testing import CrossEntropy, assert_twins, toy, toy_data
from fastaccum.memory.trials import Samples, Trials
from common import CpuMixedPrecision, Raise, weights
from launch import check, launching, script_of

@pytest.fixture(autouse=True)
def fast_gc():
    "Each trial collects garbage: leave what is there already out of it"
    gc.collect()
    gc.freeze()

@pytest.fixture(autouse=True, scope='module')
def thaw():
    yield
    gc.unfreeze()

def oom(): return torch.OutOfMemoryError('planted')

class Backward(torch.autograd.Function):
    "The identity, whose backward pass calls `f`"
    @staticmethod
    def forward(ctx, x, f):
        ctx.f = f
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        ctx.f(len(g))
        return g,None

class Holds(nn.Module):
    "Can be told to fail above `cap` samples, going forward or backward"
    def __init__(self, cap, where='forward', exc=oom):
        super().__init__()
        self.cap,self.where,self.exc,self.seen = cap,where,exc,[]
    def check(self, n):
        if n>self.cap: raise self.exc()
    def forward(self, x):
        sizes.append(len(x))
        if self.where=='forward': self.check(len(x))
        return Backward.apply(x, self.check) if self.where=='backward' and self.training else x

sizes = []   # of all batches that went through a `Holds`

def body(cap, where='forward', exc=oom, bn=False):
    "The last layer gets its gradient before the backward pass fails"
    mid = nn.BatchNorm1d(6) if bn else nn.Tanh()
    return nn.Sequential(nn.Linear(5, 6), mid, Holds(cap, where, exc), nn.Linear(6, 3)).double()

def capped(cap, where='forward', exc=oom, n=120, bn=False, bs=4, **kwargs):
    "A Learner that runs out of memory above `cap` samples"
    def fail_above(size): learn.model[2].check(size)
    class Loss(CrossEntropy):
        y_int = True   # for MixUp
        def forward(self, pred, targ):
            if where=='loss': fail_above(len(targ))
            return super().forward(pred, targ)
    def step_stat(p, state=None, **kw):
        if where=='step' and state is None: fail_above(sizes[-1])
        return {'state':torch.zeros_like(p)}
    learn = toy(bs, n=n, model=lambda: body(cap, where, exc, bn), loss_func=Loss(), **kwargs)
    if where=='step':
        opt_func = learn.opt_func
        def with_state(*args, **kw):
            opt = opt_func(*args, **kw)
            opt.cbs.insert(0, step_stat)
            return opt
        learn.opt_func = with_state
    return learn

def find(learn, **kwargs): return learn.bs_find(show_plot=False, **kwargs)

# The answer

@pytest.mark.parametrize('mode', ['power','binsearch'])
def test_every_cap(mode):
    learn = capped(0)
    for cap in range(1, 101):
        learn.model[2].cap = cap
        res = find(learn, mode=mode, steps_per_trial=2)
        assert int(res)==res.size==(cap if mode=='binsearch' else 2**(cap.bit_length()-1)), res
        assert all(o.ok==(o.size<=cap) for o in res.trials)

@pytest.mark.parametrize('mode', ['power','binsearch'])
@pytest.mark.parametrize('where', ['forward','loss','backward','step'])
@pytest.mark.parametrize('cap', [1,13])
def test_wherever_it_fails(where, cap, mode):
    assert find(capped(cap, where), mode=mode).size==(cap if mode=='binsearch' or cap==1 else 8)

texts = ['CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported',
    'MPS backend out of memory (MPS allocated: 17.90 GB)',
    'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`',
    'cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear',
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 1 bytes",
    'std::bad_alloc',
    'XPU out of memory. Tried to allocate 2.00 GiB', 'Invalid buffer size: 24.00 GiB',
    'Unable to find a valid cuDNN algorithm to run convolution']

@pytest.mark.parametrize('exc', [MemoryError,oom]+[partial(RuntimeError, o) for o in texts], ids=str)
def test_kinds_of_out_of_memory(exc):
    assert is_out_of_memory(exc())
    assert find(capped(5, exc=exc), mode='binsearch').size==5

@pytest.mark.parametrize('exc', [MemoryError,oom], ids=str)
def test_out_of_memory_in_a_callback(exc):
    "fastai puts a text of its own into the error, and fails over one that has none"
    class Take(Callback):
        def before_batch(self):
            if len(self.learn.xb[0])>6: raise exc()
    assert find(capped(100, cbs=Take()), mode='binsearch').size==6

@pytest.mark.parametrize('exc', [ValueError('out of memory'),RuntimeError('CUDA error: device-side assert triggered'),
    IndexError('x'),SystemExit(3)], ids=repr)
def test_other_errors_are_raised_as_they_are(exc):
    with pytest.raises(type(exc)) as info: find(capped(5, exc=lambda: exc))
    assert info.value is exc

def test_nothing_fits():
    with pytest.raises(torch.OutOfMemoryError, match='8, 4, 2, 1 samples were tried.*planted'):
        find(capped(0), init_val=8)

def test_batchnorm_cannot_train_on_one():
    "The error says that memory ran out before it came to that"
    learn = toy(4, model=lambda: nn.Sequential(Holds(0.5), nn.Linear(5, 3), nn.BatchNorm1d(3)).double(),
        splitter=lambda m: [list(m.parameters())])
    learn.model[0].check = lambda n: n>1 and Holds.check(learn.model[0], n)
    with pytest.raises(torch.OutOfMemoryError, match='2, 1 samples were tried.*ValueError: Expected more than 1 value'):
        find(learn)

def test_no_more_than_there_are_samples():
    "The last candidate is the dataset's length"
    for mode in ('power','binsearch'):
        res = find(capped(1000, n=50), mode=mode)
        assert ([o.size for o in res.trials],res.size)==([2,4,8,16,32,50],50) and 'no more' in repr(res)
        assert find(capped(49, n=50), mode=mode).size==(32 if mode=='power' else 49)
    assert [o.size for o in find(capped(1000, n=3), init_val=64).trials]==[3]

def test_max_trials():
    res = find(capped(1000), max_trials=3)
    assert (res.size,len(res.trials))==(8,3) and 'max_trials' in repr(res)
    assert len(find(capped(77), mode='binsearch', max_trials=9).trials)==9
    with pytest.raises(torch.OutOfMemoryError, match='64, 32 samples'): find(capped(1), init_val=64, max_trials=2)

@pytest.mark.parametrize('kwargs', [dict(mode='linear'),dict(steps_per_trial=0),dict(init_val=0),dict(init_val=2.5),
    dict(max_trials=0),dict(apply=1),dict(n_look=-1)], ids=str)
def test_bad_arguments(kwargs):
    learn = capped(5)
    nm = next(iter(kwargs))
    with pytest.raises((ValueError,TypeError), match=f'`{nm}=.*give'): find(learn, **kwargs)
    assert learn.opt is None

@pytest.mark.parametrize('nm,unit',
    [('steps_per_trial','step'),('init_val','sample'),('max_trials','trial'),('n_look','sample')])
def test_counts_have_their_units(nm, unit):
    learn = capped(5)
    for n in (10**400,10**5000,2**62+1):
        with pytest.raises(ValueError, match=f'`{nm}` is 2.*give at most .* {unit}s\n'): find(learn, **{nm:n})
    for n in (0,-10**5000):
        with pytest.raises(ValueError, match=f'give at least 1 {unit}\n'): find(learn, **{nm:n})
    with pytest.raises(TypeError, match=f'a whole number of {unit}s'): find(learn, **{nm:'2'})
    assert find(learn, **{nm:np.int64(2)}).size>=2

@pytest.mark.parametrize('nm', ['init_val','max_trials','n_look'])
def test_large_counts_work(nm): assert find(capped(5), **{nm:2**62}).size in (3,4)

def test_a_trial_of_many_steps_takes_no_memory_for_it():
    learn = capped(1000, n=2)
    class End(Callback):
        def after_step(self):
            if self.train_iter>100: raise KeyboardInterrupt
    learn.add_cb(End())
    sizes.clear()
    with pytest.raises(KeyboardInterrupt): find(learn, steps_per_trial=2**61)
    assert sizes==[2]*102

# A trial is what it says

class Turns(Callback):
    "Trains the first layer for `n` batches, then the second for one, as a GAN's switcher; notes (size, layer) of each"
    def __init__(self, n, seen): self.period,self.note = n+1,seen.append   # a list of its own would be put back
    def before_train(self): self.count = 0
    def before_batch(self):
        second = self.count%self.period==self.period-1
        self.count += 1
        for p in self.learn.model[0].parameters(): p.requires_grad_(not second)
        for p in self.learn.model[3].parameters(): p.requires_grad_(second)
        self.note((len(self.learn.xb[0]),second))

def turns(n, cap=1000):
    seen,learn = [],capped(1000, n=16, opt_func=Adam)
    class Second(nn.Linear):
        def forward(self, x):
            if self.weight.requires_grad and len(x)>cap: raise oom()
            return super().forward(x)
    learn.model[3] = Second(6, 3).double()
    learn.add_cb(Turns(n, seen))
    return learn,seen

def test_a_trial_goes_on_until_each_part_has_trained(recwarn):
    "And makes one batch more, with what that has left in memory"
    learn,seen = turns(5, cap=5)
    assert find(learn, mode='binsearch').size==5
    assert [o for o in seen if o[0]==2]==[(2,False)]*5+[(2,True),(2,False)] and (8,True) in seen
    assert all(p.requires_grad for p in learn.model.parameters()) and not recwarn.list

def test_a_trial_does_not_wait_for_ever():
    "Only the first does, and a warning says of what"
    learn,seen = turns(100)
    with pytest.warns(UserWarning, match=r"2 parameters, '3.weight' is the first, had no gradient in 23 batches"):
        assert find(learn).size==16
    assert [[o[0] for o in seen].count(n) for n in (2,4,8,16)]==[23,3,3,3]

def test_what_is_not_trained_is_not_waited_for(recwarn):
    learn = capped(1000, n=4)
    for p in learn.model[0].parameters(): p.requires_grad_(False)
    sizes.clear()
    assert find(learn).size==4 and sizes==[2]*3+[4]*3 and not recwarn.list

def test_wgan():
    "fastai's: five steps of the critic, one of the generator, whose memory counts"
    from fastai.vision.gan import FixedGANSwitcher, GANLearner
    class Generator(nn.Linear):
        def forward(self, x):
            if self.training and self.weight.requires_grad and len(x)>6: raise oom()
            return super().forward(x)
    class Critic(nn.Linear):
        def forward(self, x): return super().forward(x).mean(1)
    data = [(torch.randn(5),torch.randn(4)) for _ in range(32)]
    dls = DataLoaders(DataLoader(data, bs=4), DataLoader(data, bs=4))
    learn = GANLearner.wgan(dls, Generator(5, 4), Critic(4, 1), opt_func=Adam)
    with learn.no_bar(): assert find(learn, mode='binsearch').size==6

def test_a_trial_takes_real_steps():
    "So many forward passes of that size, each with backward pass and step, on weights that have a gradient and a state"
    for n in (2,3,5):
        steps,learn = [],capped(1000, n=64, opt_func=Adam)
        def step(p, **kw): steps.append((len(learn.xb[0]), bool(p.grad.any()), 'grad_avg' in kw))
        opt_func = learn.opt_func
        def with_spy(*args, **kw):
            opt = opt_func(*args, **kw)
            opt.cbs.append(step)
            return opt
        learn.opt_func = with_spy
        sizes.clear()
        find(learn, steps_per_trial=n)
        assert sizes==[o for o in (2,4,8,16,32,64) for _ in range(n)]
        assert steps==[(o,True,True) for o in sizes for _ in learn.model.parameters()]

def test_two_steps_at_least():
    "Only the second forward pass meets the optimizer's state"
    sizes.clear()
    find(capped(1000, n=2), steps_per_trial=1)
    assert sizes==[2,2]

class HeldGrads(Callback):
    "Notes in the forward pass whether gradients are held"
    def __init__(self, held):
        setattr(self, 'after_pred', lambda: held.append(self.learn.model[0].weight.grad is not None))

def test_gradients_are_held_as_within_a_macro_batch():
    held = []
    learn = capped(1000, n=2, cbs=HeldGrads(held), opt_func=partial(OptimWrapper, opt=torch.optim.Adam))
    find(learn)
    assert held==[False,True,True]

def test_a_step_that_the_scaler_skips_does_not_count():
    taken = []
    class Taken(Callback):
        order = 20
        def after_step(self): taken.append(not self.learn.mixed_precision.skipped)
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = torch.utils.data.TensorDataset(torch.randn(8, 5)*200, torch.randint(0, 3, (8,)))
    learn = toy(4, data=data, model=model, splitter=lambda m: [list(m.parameters())],
        loss_func=lambda p,t: nn.functional.cross_entropy(p, t)*1e3,
                cbs=[CpuMixedPrecision(init_scale=2.**16),Taken()])
    assert find(learn, init_val=8).size==8
    assert taken.count(True)==3 and taken.count(False)>0

@pytest.mark.parametrize('exc', [CancelFitException])
@pytest.mark.parametrize('event', ['before_batch','before_epoch','after_batch'])
def test_a_trial_that_was_none(event, exc):
    "Who ends the fit keeps the trial from finding anything out: that is no success"
    class End(Callback): pass
    cb = End()
    def end(): raise exc
    setattr(cb, event, end)
    with pytest.raises(RuntimeError, match='a trial of 3 steps made') as info: find(capped(5, cbs=cb))
    assert not is_out_of_memory(info.value)

def test_no_step_is_no_trial():
    class Skip(Callback):
        def before_step(self):
            from fastai.callback.core import CancelStepException
            raise CancelStepException
    with pytest.raises(RuntimeError, match='made 0, in 23 batches'): find(capped(5, cbs=Skip()))

# Who hears of it

class Ema(Callback):
    "A moving average of the weights, in memory of its own"
    order = 11
    def before_fit(self):
        if not hasattr(self, 'shadow'): self.shadow = copy.deepcopy(self.learn.model)
    def after_step(self):
        with torch.no_grad():
            for a,b in zip(self.shadow.parameters(), self.learn.model.parameters()): a.mul_(0.9).add_(b, alpha=0.1)
        for a,b in zip(self.shadow.buffers(), self.learn.model.buffers()): a.copy_(b)

class Log(Callback):
    run_bs_find = False
    def __init__(self, heard): self.heard_events = heard
    def before_fit(self): self.heard_events.append('before_fit')
    def after_batch(self): self.heard_events.append('after_batch')

class Count(Metric):
    "Counts in lists, and draws random numbers"
    def __init__(self): self.calls = []
    def reset(self): self.calls.append('reset')
    def accumulate(self, learn): self.calls.append(random.random())
    @property
    def value(self): return float(len(self.calls))

def test_listeners_do_not_hear_of_it(tmp_path):
    heard,sched = [],[]
    cbs = [CSVLogger(tmp_path/'log.csv'),SaveModelCallback(fname='best'),TerminateOnNaNCallback(),
        ShortEpochCallback(0.01),Log(heard),
           ParamScheduler({'lr':lambda pos: sched.append(pos) or 0.1}),GradientAccumulation(16)]
    learn = capped(11, cbs=cbs, metrics=Count())
    learn.logger = lambda *o: heard.append('logged')
    sizes.clear()
    assert find(learn, mode='binsearch').size==11
    assert max(map(sizes.count, sizes))==3   # nobody makes more batches of three steps, or fewer
    assert heard==sched==learn.metrics[0].calls==[] and not list(tmp_path.iterdir())
    assert not hasattr(learn.recorder, 'lrs')

def test_a_loss_of_nan_takes_memory_too():
    "fastai's `TerminateOnNaNCallback` would end the trial"
    class Nan(CrossEntropy):
        def forward(self, *args): return super().forward(*args)*float('nan')
    assert find(toy(4, n=9, loss_func=Nan(), cbs=TerminateOnNaNCallback())).size==9

def test_those_who_act_take_part():
    "With their memory: here, the largest size is what a callback has room for"
    class Keep(Callback):
        def before_batch(self):
            if len(self.learn.xb[0])>9: raise oom()
    acted = []
    class Act(Callback):
        def after_backward(self): acted.append(1)
    assert find(capped(20, cbs=[Keep(),Act(),GradientClip(),Ema()]), mode='binsearch').size==9 and acted

# All is as before

def plain(o, depth=0):
    "What can be compared of `o`, with the identity of what must stay the same object"
    if isinstance(o, torch.Tensor):
        grad = None if not o.is_leaf or o.grad is None else o.grad.tolist()
        return 'tensor',id(o),str(o.dtype),str(o.device),o.requires_grad,repr(o.detach().tolist()),repr(grad)
    if isinstance(o, np.ndarray): return 'array',id(o),repr(o.tolist())
    if isinstance(o, (str,int,float,bool,type(None))): return repr(o)
    if isinstance(o, random.Random): return 'random',id(o),hash(o.getstate())
    if isinstance(o, (tuple,list)):
        return type(o).__name__,id(o) if isinstance(o, list) else 0,[plain(x, depth+1) for x in o]
    if isinstance(o, dict): return type(o).__name__,id(o),[(plain(k, depth+1),plain(v, depth+1)) for k,v in o.items()]
    if depth<5 and hasattr(o, '__dict__') and not isinstance(o,
            (type,Learner,DataLoaders,DataLoader)) and not callable(o):
        return type(o).__name__,id(o),plain(vars(o), depth+1)
    return type(o).__name__,id(o)

def everything(learn):
    "All that must be as before, as one dict; written without `Snapshot`"
    mods = {nm:(m.training,plain(m._parameters),plain(m._buffers),len(m._forward_hooks),len(m._backward_hooks))
        for nm,m in learn.model.named_modules()}
    res = dict(learn={k:plain(v) for k,v in vars(learn).items()}, keys=list(vars(learn)), modules=mods,
        opt=plain(learn.opt),
        cbs=[id(o) for o in learn.cbs], cb_vars=[plain(vars(o)) for o in learn.cbs], order=[o.order for o in learn.cbs],
        run=[(o.run,o.run_train,o.run_valid) for o in learn.cbs],
        loaders=[(id(o),plain(vars(o)),o.bs,len(o)) for o in learn.dls.loaders],
        dls=plain(vars(learn.dls)), autocast=autocast_state(), grad=torch.is_grad_enabled(),
        rng=(hash(random.getstate()),repr(np.random.get_state()),repr(torch.get_rng_state().tolist())))
    if learn.opt is not None:
        res |= dict(state=plain(tuple(learn.opt.state.values())), hypers=plain(tuple(learn.opt.hypers)))
    if hasattr(learn, 'ema') and hasattr(learn.ema, 'shadow'):
        res |= dict(ema=plain((*learn.ema.shadow.parameters(),*learn.ema.shadow.buffers())))
    return res

def same(a, b): assert [k for k in a if a[k]!=b[k]]==[] and a.keys()==b.keys()

class Draw(Callback):
    "Draws from all generators, adds to lists and dicts, sets flags, replaces loss function and logger, hooks the model"
    def __init__(self): self.notes,self.d,self.arr,self.rng = [],{},np.zeros(2),random.Random(3)
    def before_batch(self):
        random.random(); np.random.rand(); torch.rand(1); self.rng.random()
        self.notes.append(len(self.learn.xb[0])); self.d[len(self.d)] = [0]; self.arr += 1; self.run_valid = False
        self.learn.loss_func = partial(self.learn.loss_func); self.learn.logger = print
        self.learn.model[0].register_forward_hook(lambda *o: None)
        self.learn.model[0].new = torch.zeros(1)
        self.learn.new_attribute = 1
        self.learn.model[3].bias.requires_grad_(False)

def rich(cap, where='forward', fitted=True, exc=oom, amp=False, **kwargs):
    "A Learner with much to lose"
    cbs = [Draw(),Ema(),GradientClip(),GradientAccumulation(12),CSVLogger('log.csv')]
    learn = capped(1000 if fitted else cap, where, exc, bn=True, opt_func=Adam, metrics=Count(), shuffle=True, cbs=cbs,
        **kwargs)
    if fitted:
        with learn.no_logging(): learn.fit(1, 0.1)
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)   # left over
        learn.model[2].cap = cap
    return learn

@pytest.mark.parametrize('fitted', [False,True])
@pytest.mark.parametrize('where', ['forward','backward','loss'])
@pytest.mark.parametrize('kind', ['success','nothing','error','interrupt'])
def test_everything_is_as_before(kind, where, fitted):
    exc = dict(success=oom, nothing=oom, error=lambda: ValueError('planted'), interrupt=KeyboardInterrupt)[kind]
    learn = rich(0 if kind=='nothing' else 9, where, fitted, exc)
    before = everything(learn)
    raised = dict(nothing=torch.OutOfMemoryError, error=ValueError, interrupt=KeyboardInterrupt).get(kind)
    if raised:
        with pytest.raises(raised): find(learn, mode='binsearch')
    else: assert find(learn, mode='binsearch').size==9
    same(before, everything(learn))

events = ('before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward '
    'before_step after_step after_batch after_cancel_fit after_fit').split()

@pytest.mark.parametrize('event', events)
@pytest.mark.parametrize('order', [-100,40])
def test_interrupt_at_any_event(event, order):
    calls = []
    class Interrupt(Callback): pass
    def interrupt():
        calls.append(1)
        if len(calls)==5: raise KeyboardInterrupt
    Interrupt.order = order
    learn = rich(1000, exc=oom)
    cb = Interrupt()
    setattr(cb, event, interrupt)
    learn.add_cb(cb)
    calls.clear()
    before = everything(learn)
    with pytest.raises(KeyboardInterrupt): find(learn)
    same(before, everything(learn))

@pytest.mark.parametrize('where', ['Snapshot.put_back','Trials.__init__','Samples.loader','free_memory','Trials.close'])
def test_interrupt_between_trials(where, monkeypatch):
    "Wherever in the finder's own code it comes"
    import fastaccum.memory.trials as mod
    calls,(nm,*attr) = [],where.split('.')
    holder = getattr(mod, nm) if attr else mod
    stock = getattr(holder, attr[0] if attr else nm)
    def interrupt(*args, **kwargs):
        res = stock(*args, **kwargs)
        calls.append(1)
        if len(calls)==min(3, 1 if attr in (['__init__'],['close']) else 3): raise KeyboardInterrupt
        return res
    learn = rich(9)
    before = everything(learn)
    monkeypatch.setattr(holder, attr[0] if attr else nm, interrupt)
    with pytest.raises(KeyboardInterrupt): find(learn)
    monkeypatch.undo()
    same(before, everything(learn))

def mixup():
    "fastai's, in double precision"
    cb = MixUp()
    cb.distrib = torch.distributions.Beta(*[torch.tensor(0.4, dtype=torch.float64)]*2)
    return cb

def recorded(learn):
    return [o[1:-1] for o in learn.recorder.values],learn.recorder.lrs,[float(o) for o in learn.recorder.losses]

@pytest.mark.parametrize('acc', [False,True])
@pytest.mark.parametrize('cap', [0,9])
@pytest.mark.parametrize('fitted', [False,True])
def test_training_goes_on_as_if_nothing_had_been(fitted, cap, acc, tmp_path):
    "Bit for bit: weights, optimizer, gradients, losses, the log, the moving average"
    learns = []
    for searched in (False,True):
        random.seed(1); np.random.seed(1); torch.manual_seed(1)
        cbs = [mixup(),Ema(),GradientClip(),
            CSVLogger(tmp_path/f'{searched}.csv', append=True)]+([GradientAccumulation(12)] if acc else [])
        learn = capped(1000, bn=True, opt_func=Adam, shuffle=True, n=70, cbs=cbs, metrics=Count())
        with learn.no_logging():
            if fitted: learn.fit_one_cycle(1, 0.1)
            learn.model[2].cap = cap
            if searched and cap: find(learn, mode='binsearch')
            if searched and not cap:
                with pytest.raises(torch.OutOfMemoryError): find(learn)
            learn.model[2].cap = 1000
            learn.fit_one_cycle(2, 0.1)
        learns.append(learn)
    a,b = learns
    assert weights(a).equal(weights(b)) and set(assert_twins(a, b).values())=={0.} and recorded(a)==recorded(b)
    assert all(p.equal(q) for p,q in zip(a.ema.shadow.parameters(), b.ema.shadow.parameters()))
    logs = [(tmp_path/f'{o}.csv').read_text() for o in (False,True)]
    assert logs[0]==logs[1] and len(logs[0].splitlines())==(5 if fitted else 3)

@pytest.mark.parametrize('mode', ['fp16','bf16'])
@pytest.mark.parametrize('where', ['forward','loss','backward','step'])
def test_mixed_precision(where, mode):
    "In the Learner's precision; autocast is left"
    dtypes = set()
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), Holds(9, where), nn.Linear(6, 3))
    data = torch.utils.data.TensorDataset(*(o.float() if o.is_floating_point() else o for o in toy_data(40).tensors))
    learn = toy(4, data=data, model=model, cbs=[CpuMixedPrecision(amp_mode=mode),GradientClip()],
                loss_func=lambda p,t: (where=='loss' and learn.model[2].check(len(t)),
        nn.functional.cross_entropy(p, t))[1])
    class Step(Callback):
        def before_step(self): where=='step' and learn.model[2].check(len(self.learn.xb[0]))
        def after_pred(self):
            own = self.learn.model[3].weight.dtype
            dtypes.add(torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else own)
    learn.add_cb(Step())
    before = everything(learn)
    assert find(learn, mode='binsearch').size==9
    same(before, everything(learn))
    assert not torch.is_autocast_enabled('cpu') and dtypes=={torch.float16 if mode=='fp16' else torch.bfloat16}
    with torch.autocast('cpu', dtype=torch.bfloat16):
        inside = autocast_state()
        assert find(learn, mode='binsearch').size==9
        assert autocast_state()==inside

def test_within_a_fit():
    "A callback may search before its fit begins: the fit is the same"
    class Search(Callback):
        def __init__(self): self.found = None
        def before_fit(self):
            self.learn.model[2].cap = 9
            self.found = int(find(self.learn, mode='binsearch'))
            self.learn.model[2].cap = 1000
    Search.run_bs_find = False
    a,b = (capped(1000, bn=True, opt_func=Adam, shuffle=True, n=70) for _ in range(2))
    torch.manual_seed(2)
    a.fit_one_cycle(2, 0.1)
    torch.manual_seed(2)
    cb = Search()
    b.fit_one_cycle(2, 0.1, cbs=cb)
    assert cb.found==9 and set(assert_twins(a, b).values())=={0.}

# Nothing is kept

@pytest.mark.parametrize('kind', ['success','nothing'])
def test_nothing_is_kept(kind, monkeypatch):
    "Neither activations nor copies outlive the search, without the garbage collector's help"
    import fastaccum.memory.trials as mod
    from fastaccum.memory.samples import Again
    refs = []
    for cls in (mod.Snapshot,mod.Samples,Again,mod.StepsCallback,mod.Trials):
        def init(self, *args, stock=cls.__init__, **kwargs):
            stock(self, *args, **kwargs)
            refs.append((type(self).__name__,weakref.ref(self)))
        monkeypatch.setattr(cls, '__init__', init)
    class Watch(nn.Module):
        def forward(self, x):
            y = x.clone()
            refs.append(('activation',weakref.ref(y)))
            return y
    learn = capped(0 if kind=='nothing' else 9, cbs=[GradientClip(),mixup(),CSVLogger()], opt_func=Adam)
    learn.model.insert(0, Watch())
    learn.model[3].check = partial(Holds.check, learn.model[3])
    gc.collect()
    monkeypatch.setattr(gc, 'collect', lambda *args: 0)
    gc.disable()
    try:
        try: find(learn, mode='binsearch')
        except torch.OutOfMemoryError: pass
        assert {o for o,_ in refs}=={'Snapshot','Samples','Again','StepsCallback','Trials','activation'}
        assert [o for o,ref in refs if ref() is not None]==[]
    finally: gc.enable()

def test_reference_cycles_of_a_model_are_collected():
    refs = []
    class Cycle(nn.Module):
        def forward(self, x):
            held = {'x':x.clone()}
            held['self'] = held
            refs.append(weakref.ref(held['x']))
            return x
    gc.disable()
    try:
        find(toy(4, n=8, model=lambda: nn.Sequential(Cycle(), nn.Linear(5, 3)).double(),
            splitter=lambda m: [list(m.parameters())]))
        assert len(refs)==9 and [o for o in refs if o() is not None]==[]
    finally: gc.enable()

def test_an_interrupt_while_putting_back_waits():
    from fastaccum.memory.snapshot import Snapshot
    xs,hits = [1],[]
    def interrupt():
        hits.append(1)
        if len(hits)<3: raise KeyboardInterrupt
    snap = Snapshot(xs)
    snap.puts.insert(0, (interrupt,))
    xs.append(2)
    with pytest.raises(KeyboardInterrupt): snap.put_back()
    assert xs==[1] and len(hits)==3

def test_the_garbage_collector_is_as_before():
    gc.unfreeze()
    find(capped(9))
    assert not gc.get_freeze_count() and gc.isenabled()
    with pytest.raises(ValueError): find(capped(9, exc=lambda: ValueError('planted')))
    assert not gc.get_freeze_count()
    gc.freeze()
    n = gc.get_freeze_count()
    find(capped(9))
    assert gc.get_freeze_count()>n/2   # what somebody froze stays so

@pytest.mark.parametrize('nm', ['put_back','close','entry'])
def test_an_interrupt_while_putting_back_does_not_leave_it_frozen(nm, monkeypatch):
    "In the last `put_back`, after it, and before the first line of what closes the search"
    from fastaccum.memory import trials
    from fastaccum.memory.snapshot import Snapshot
    gc.unfreeze()
    learn,closing = capped(9),[]
    put_back,close = Snapshot.put_back,Trials.close
    def mid(self):
        put_back(self)
        if closing: raise KeyboardInterrupt
    def begin(self):
        closing.append(1)
        if nm=='entry': raise KeyboardInterrupt
        close(self)
        if nm=='close': raise KeyboardInterrupt
    if nm=='put_back': monkeypatch.setattr(Snapshot, 'put_back', mid)
    monkeypatch.setattr(Trials, 'close', begin)
    before = everything(learn)
    with pytest.raises(KeyboardInterrupt): find(learn)
    assert closing and not gc.get_freeze_count()
    monkeypatch.undo()
    same(before, everything(learn))

def test_optimizer_state_and_gradients_are_freed():
    learn = capped(9, opt_func=Adam)
    made = []
    class See(Callback):
        def after_step(self): made.extend(weakref.ref(s['grad_avg']) for s in self.learn.opt.state.values())
    learn.add_cb(See())
    before = [o for o in gc.get_objects() if torch.is_tensor(o)]
    n = len(before)
    del before
    find(learn)
    assert made and not any(o() is not None for o in made) and all(p.grad is None for p in learn.model.parameters())
    gc.collect()
    assert sum(torch.is_tensor(o) for o in gc.get_objects())<=n

# Loaders

def pad(items):
    return nn.utils.rnn.pad_sequence([o[0] for o in items], batch_first=True),torch.stack([o[1] for o in items])

class Tokens(nn.Module):
    "Takes memory by the tokens of a batch"
    def __init__(self, cap): super().__init__(); self.cap,self.lin,self.shapes = cap,nn.Linear(1, 2),[]
    def forward(self, x):
        shapes.append(tuple(x.shape))
        if x.numel()>self.cap: raise oom()
        return self.lin(x[...,None].float()).mean(1)
shapes = []

def varied(cap, lens, loader=DataLoader, **kwargs):
    data = [(torch.ones(n),torch.tensor(i%2)) for i,n in enumerate(lens)]
    kwargs = kwargs or {'create_batch' if loader is DataLoader else 'collate_fn':pad, 'shuffle':True}
    dls = DataLoaders(loader(data, batch_size=4, **kwargs), loader(data, batch_size=4, **kwargs))
    learn = Learner(dls, Tokens(cap), nn.CrossEntropyLoss(), opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    return learn

@pytest.mark.parametrize('loader', [DataLoader,torch.utils.data.DataLoader], ids=['fastai','torch'])
def test_the_largest_inputs_are_tried(loader):
    lens = [3]*150+[40]+[3]*49
    learn = varied(400, lens, loader)
    shapes.clear()
    assert find(learn, mode='binsearch').size==10 and {o[1] for o in shapes}=={40}
    assert max(len(b[0])*b[0].shape[1] for b in learn.dls.train)<=160 and learn.opt is None
    learn = varied(400, lens, loader, **({'create_batch':pad} if loader is DataLoader else {'collate_fn':pad}))
    assert find(learn, mode='binsearch', n_look=100).size==133   # the longest was not looked at, the page says so

@pytest.mark.parametrize('kind', ['list','dict','numpy','str','tensors'])
def test_lengths_are_seen_in_whatever_holds_the_inputs(kind):
    make = dict(list=lambda n: ([1]*n,0), dict=lambda n: {'ids':[1]*n, 'y':0}, numpy=lambda n: (np.ones(n),0),
        str=lambda n: ('x'*n,0),
                tensors=lambda n: ([torch.ones(n),torch.ones(2)],0))[kind]
    data = [make(n) for n in (3,9,5,4)]
    for loader in (DataLoader,torch.utils.data.DataLoader): assert Samples(loader(data, batch_size=2)).idxs==[1,2,3,0]

def test_not_more_samples_are_read_than_looked_at_or_needed():
    read = []
    class Read(list):
        def __getitem__(self, i): read.append(i); return super().__getitem__(i)
    data = Read((torch.ones(5),torch.tensor(0)) for i in range(5000))
    dls = DataLoaders(DataLoader(data, bs=4), DataLoader(data, bs=4))
    learn = Learner(dls, Tokens(160), nn.CrossEntropyLoss())
    with learn.no_bar(): assert find(learn, n_look=50).size==32
    # each step reads its batch, and the loader itself may try a sample
    assert len(read)<=50+3*sum([2,4,8,16,32,64])+10

def test_sorted_text_loader():
    "fastai's own, which knows all lengths: none is read to find out"
    from fastai.text.data import SortedDL, pad_input
    lens = [5+i%3 for i in range(300)]+[50]+[5]*100
    data = [(torch.full((n,), 2),torch.tensor(i%2)) for i,n in enumerate(lens)]
    for shuffle in (False,True):
        dls = DataLoaders(SortedDL(data, bs=4, shuffle=shuffle, before_batch=pad_input, num_workers=0),
            SortedDL(data, bs=4, before_batch=pad_input, num_workers=0))
        learn = Learner(dls, Tokens(1000), nn.CrossEntropyLoss())
        before = plain(vars(dls.train)),np.random.get_state()[1].tolist()
        with learn.no_bar(): assert find(learn, mode='binsearch', n_look=1).size==20
        assert (plain(vars(dls.train)),np.random.get_state()[1].tolist())==before
        assert [lens[i] for i in Samples(dls.train, n_look=1).idxs]==sorted(lens, reverse=True)

def test_language_model_loader():
    from fastai.text.data import LMDataLoader
    data = [torch.arange(1000) for _ in range(20)]
    dls = DataLoaders(LMDataLoader(data, bs=4, seq_len=50), LMDataLoader(data, bs=64, seq_len=50))
    class Next(Tokens):
        def forward(self, x):
            super().forward(x)
            return self.lin(x[...,None].float()).transpose(1, 2)
    learn = Learner(dls, Next(1500), lambda p,t: nn.functional.cross_entropy(p, t%2))
    with learn.no_bar(): assert find(learn, mode='binsearch', apply=True).size==30
    assert [len(o[0]) for o in (dls.train.one_batch(),dls.valid.one_batch())]==[30,30]
    assert dls.train.one_batch()[0].shape==(30,50)
    x = torch.cat([b[0] for b in dls.train], 1)   # the rows run on from batch to batch
    assert ((x[:,1:]-x[:,:-1])%1000==1).all()

def test_iterable_datasets():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self): return ((torch.ones(5),torch.tensor(0)) for _ in range(50))
    for loader in (DataLoader,torch.utils.data.DataLoader):
        dls = DataLoaders(loader(Stream(), batch_size=4, **({'n':50} if loader is DataLoader else {})),
            loader(Stream(), batch_size=4))
        learn = Learner(dls, Tokens(60), nn.CrossEntropyLoss())
        learn.remove_cb(ProgressCallback)
        if loader is not DataLoader: dls.train.__class__ = type('Sized', (loader,), {'__len__':lambda self: 13})
        assert find(learn, mode='binsearch').size==12
        learn.model.cap = 10**6
        assert find(learn, mode='binsearch').size==50

def test_ready_made_batches_are_refused():
    batches = [(torch.ones(4, 5),torch.zeros(4).long())]*3
    for dl in (DataLoader(batches, bs=None),torch.utils.data.DataLoader(batches, batch_size=None)):
        learn = Learner(DataLoaders(dl, dl), Tokens(60), nn.CrossEntropyLoss())
        with pytest.raises(ValueError, match='come ready-made.*batch size'): find(learn)

def test_no_samples():
    learn = capped(9)
    learn.dls.train = DataLoader([], bs=4)
    with pytest.raises(ValueError, match='no batch'): find(learn)

def test_batch_transforms_take_part():
    "They run on the device, on each batch"
    calls = []
    class Twice:
        def __call__(self, b, **kw): calls.append(len(b[0])); return b
    learn = varied(200, [5]*64, create_batch=pad, after_batch=Twice())
    assert find(learn, steps_per_trial=2).size==32 and calls==[o for o in (2,4,8,16,32) for _ in range(2)]+[64]

# Applying it

def test_apply_gives_the_loaders_the_size_and_changes_nothing_else():
    learn = capped(20, n=100, shuffle=True)
    learn.dls.loaders.append(DataLoader(toy_data(10), bs=8))
    loaders,state = list(learn.dls.loaders),[{k:v for k,v in vars(o).items() if k!='bs'} for o in learn.dls.loaders]
    before = everything(learn)
    assert find(learn, apply=True).size==16
    assert [o.bs for o in learn.dls.loaders]==[16,16,8] and all(a is b for a,b in zip(loaders, learn.dls.loaders))
    assert state==[{k:v for k,v in vars(o).items() if k!='bs'} for o in loaders]
    after = everything(learn)
    same({k:v for k,v in before.items() if k!='loaders'}, {k:v for k,v in after.items() if k!='loaders'})
    sizes.clear()
    learn.fit(1, 0.1)
    assert sizes[:7]==[16]*6+[4]

def test_apply_keeps_what_new_would_lose():
    from fastai.callback.data import WeightedDL
    data = [(torch.ones(5),torch.tensor(0)) for _ in range(50)]
    dl = WeightedDL(data, bs=4, wgts=np.arange(50.), shuffle=True, num_workers=0)
    learn = Learner(DataLoaders(dl, DataLoader(data, bs=4)), Tokens(60), nn.CrossEntropyLoss())
    wgts = dl.wgts.copy()
    with learn.no_bar(): assert find(learn, apply=True).size==8
    assert learn.dls.train is dl and (dl.wgts==wgts).all() and dl.one_batch()[0].shape==(8,5)

def test_apply_to_torch_loaders():
    data = torch.utils.data.TensorDataset(torch.ones(50, 5), torch.zeros(50).long())
    gen = torch.Generator().manual_seed(1)
    dl = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True, generator=gen, timeout=0)
    learn = Learner(DataLoaders(dl, torch.utils.data.DataLoader(data, batch_size=4)), Tokens(60), nn.CrossEntropyLoss())
    state = gen.get_state()
    with learn.no_bar(): assert find(learn, apply=True).size==8
    new = learn.dls.train
    assert (new.batch_size,new.sampler is dl.sampler,new.drop_last,new.generator is gen,len(new),
        learn.dls.valid.batch_size)==(8,True,True,True,6,4)
    assert gen.get_state().equal(state)

# What is shown

def test_result_prints_and_counts():
    res = find(capped(9), mode='binsearch')
    assert list(range(res))==list(range(9)) and f'{res:}'==repr(res)==str(res)
    assert repr(res).startswith("9 samples fit, 10 do not (mode 'binsearch', 7 trials")
    assert len(repr(res).splitlines())==9 and res.seconds==sum(o.seconds for o in res.trials)>0
    assert all((o.speed is not None and o.error is None)==o.ok for o in res.trials)
    assert res.trials[3].error=='OutOfMemoryError: planted'

def test_plot():
    from matplotlib import pyplot as plt
    plt.close('all')
    res = find(capped(9))
    assert not plt.get_fignums()
    res = capped(9).bs_find()
    assert len(plt.get_fignums())==1
    for peak in (None,2**30):
        for o in res.trials: o.peak = peak
        axs = res.plot()
        assert list(axs[1].lines[0].get_xdata())==[2,4,8] and len(axs[0].lines)==(1 if peak is None else 2)
    plt.close('all')

@pytest.mark.nbdev
def test_the_page_is_the_same_whenever_it_is_run():
    "Its saved outputs say nothing that differs from run to run"
    import json
    root = Path(__file__).parent.parent
    page = root/'nbs'/'06_bs_find.ipynb'
    def outputs(nb):
        return {c['id']:[o.get('text',o.get('data',{}).get('text/plain')) for o in c['outputs']]
            for c in nb['cells'] if c.get('outputs')}
    code = f"""
import json, sys
from pathlib import Path
from execnb.shell import CaptureShell, read_nb
shell,nb = CaptureShell(path={str(page.parent)!r}),read_nb({str(page)!r})
skip = ('#| cuda','import nbdev','#| hide\\nimport nbdev')
for c in nb.cells:
    if c.cell_type=='code' and not c.source.startswith(skip): shell.cell(c)
print('OUT'+json.dumps([dict(id=c['id'], outputs=c.get('outputs', [])) for c in nb.cells], default=str))
"""
    ran = {'cells':json.loads(result(run(code)).split('OUT', 1)[1])}
    saved = outputs(json.loads(page.read_text(encoding='utf-8')))
    assert saved and outputs(ran)==saved

def test_progress_only_where_there_is_a_bar(capsys):
    learn = capped(9)
    find(learn)
    assert capsys.readouterr()==('','')
    learn.add_cb(ProgressCallback())
    before = everything(learn)
    find(learn)
    assert '16 do not fit' in capsys.readouterr().out
    same(before, everything(learn))
    with learn.no_bar(): find(learn)
    with learn.no_mbar(): find(learn)
    assert capsys.readouterr()==('','')

# Real memory, and several processes

def run(code, *args):
    env = dict(os.environ, OMP_NUM_THREADS='1', MALLOC_MMAP_THRESHOLD_='65536',
        PYTHONPATH=str(Path(__file__).parent.parent))
    return subprocess.Popen([sys.executable,'-W','ignore','-c',code,*map(str, args)], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)

def result(proc):
    out,err = proc.communicate(timeout=300)
    assert not proc.returncode, out+err
    return out

limited = '''
import resource, sys, torch
from pathlib import Path
from torch import nn
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam
import fastaccum
torch.set_num_threads(1)
class Data:
    def __len__(self): return 4096
    def __getitem__(self, i): return torch.ones(2**14),torch.tensor(i%2)   # 64 KB
class Wide(nn.Module):   # 1 MB of activations for a sample
    def __init__(self): super().__init__(); self.w,self.lin = nn.Parameter(torch.ones(2**14)),nn.Linear(2**14, 2)
    def forward(self, x):
        for _ in range(16): x = x*self.w
        return self.lin(x)
model = Wide()
dls = DataLoaders(DataLoader(Data(), bs=4), DataLoader(Data(), bs=4))
learn = Learner(dls, model, nn.CrossEntropyLoss(), opt_func=Adam)
def used():
    lines = Path('/proc/self/status').read_text().splitlines()
    return int(next(o for o in lines if o.startswith('VmSize')).split()[1])*1024
def fit(bs):
    dl = DataLoader(Data(), bs=bs, n=3*bs)
    l = Learner(DataLoaders(dl, DataLoader(Data(), bs=1, n=1)), model, nn.CrossEntropyLoss(), opt_func=Adam)
    with l.no_bar(), l.no_logging(): l.fit(1, 1e-3)
with learn.no_bar():
    learn.bs_find(max_trials=1, show_plot=False)   # what is loaded lazily is loaded
    limit = used()+100*2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit,limit))
    before = {k:v.clone() for k,v in model.state_dict().items()}
    res = learn.bs_find(mode='binsearch', init_val=16, show_plot=False)
    print(repr(res))
    assert all(v.equal(before[k]) for k,v in model.state_dict().items()) and learn.opt is None
    bad = [o for o in res.trials if not o.ok]
    texts = "can't allocate memory",'bad_alloc','MemoryError'
    assert bad and all(any(x in o.error for x in texts) for o in bad), bad
    fit(res.size)
    try: fit(2*res.size)
    except RuntimeError as e: assert "can't allocate memory" in str(e)
    else: raise AssertionError('twice the size fits as well')
print('OK')
'''

def test_real_memory():
    "The CPU's allocator really fails, at a limit of the process"
    out = result(run(limited))
    assert out.endswith('OK\n') and 40<=int(out.split()[0])<=100   # about 1 MB for each in 100 MB

vague = '''
import resource, sys, torch
from pathlib import Path
from fastaccum.memory.shortage import is_out_of_memory
from fastaccum.memory.meters import memory_left
texts = ['could not create a primitive', 'could not execute a primitive', 'could not create a memory object',
    "can't start new thread"]
def judged(): return [is_out_of_memory(RuntimeError(o)) for o in texts]
assert judged()==[False]*4, 'there is plenty'
def used():
    lines = Path('/proc/self/status').read_text().splitlines()
    return int(next(o for o in lines if o.startswith(sys.argv[2])).split()[1])*1024
kind,hard = getattr(resource, sys.argv[1]),resource.RLIM_INFINITY
resource.setrlimit(kind, (used()+400*2**20,hard))
assert judged()==[False]*4 and 300*2**20<memory_left()<=400*2**20, memory_left()
x = torch.empty(370*2**20, dtype=torch.uint8)
assert judged()==[True]*4 and memory_left()<2**26, memory_left()
del x
assert judged()==[kind==resource.RLIMIT_AS]*4, 'oneDNN does not get over it: the peak of the address space counts'
assert not is_out_of_memory(RuntimeError('mat1 and mat2 shapes cannot be multiplied'))
print('OK')
'''

@pytest.mark.parametrize('kind,used', [('RLIMIT_AS','VmPeak'),('RLIMIT_DATA','VmData')])
def test_words_with_several_causes_count_where_memory_is_short(kind, used):
    "What oneDNN says when memory is exhausted, it also says of what it cannot do"
    assert result(run(vague, kind, used))=='OK\n'

@pytest.mark.parametrize('left,want', [(0,True),(2**26-1,True),(2**26,False),(None,False)])
def test_vague_words_in_a_search(left, want, monkeypatch):
    "Where memory is not short, or nobody tells, the error is raised as it is"
    monkeypatch.setattr('fastaccum.memory.shortage.memory_left', lambda: left)
    learn = capped(5, exc=partial(RuntimeError, 'could not create a primitive'))
    if want: assert find(learn, mode='binsearch').size==5
    else:
        with pytest.raises(RuntimeError, match='^could not create a primitive$'): find(learn)

@pytest.mark.parametrize('files,left', [
    (dict(limits='Max data size unlimited'), 7*2**20),
    (dict(limits='Max address space         104857600            unlimited            bytes'), 3*2**20),
    (dict(limits='Max data size             104857600            unlimited            bytes'), 5*2**20),
    (dict(overcommit='2'), 2*2**20), (dict(status=None), None), (dict(status='VmSize: 1 kB'), None)], ids=str)
def test_memory_left(files, left, monkeypatch):
    "The least of what the system and the limits leave; `None` where it cannot be read"
    from fastaccum.memory import meters
    texts = dict(status=f'VmPeak: {97*1024} kB\nVmSize: {50*1024} kB\nVmData: {95*1024} kB', limits='', overcommit='0',
        meminfo=f'MemAvailable: {4*1024} kB\nSwapFree: {3*1024} kB\n'
            f'CommitLimit: {10*1024} kB\nCommitted_AS: {8*1024} kB') | files
    def read_text(path):
        text = next(v for k,v in texts.items() if k in str(path))
        if text is None: raise FileNotFoundError(2, 'none')
        return text
    monkeypatch.setattr(meters.Path, 'read_text', read_text)
    assert meters.memory_left()==left

def test_out_of_memory_while_a_batch_is_put_together(monkeypatch):
    "fastai's words about it fail over labels without a shape"
    from fastai.data import load
    collate = load.fa_collate
    def full(samples):
        if len(samples)>6: raise oom()
        return collate(samples)
    learn = toy(4, data=[(torch.randn(5).double(),i%3) for i in range(20)])
    monkeypatch.setattr(load, 'fa_collate', full)
    assert find(learn, mode='binsearch').size==6

def test_an_error_while_another_is_handled_is_its_own():
    def clumsy():
        try: raise oom()
        except RuntimeError: raise AttributeError('x')
    with pytest.raises(AttributeError) as info: clumsy()
    assert not is_out_of_memory(info.value)

def test_the_system_says_it_by_number():
    assert is_out_of_memory(OSError(12, 'Cannot allocate memory'))
    assert not is_out_of_memory(OSError(28, 'No space left on device'))
    assert is_out_of_memory(RuntimeError('unable to mmap 64 bytes from file </torch_1>: Cannot allocate memory (12)'))

several,cases = script_of('bs_find_processes.py')
launches = launching(several, {n:cases for n in (2,3)})

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.parametrize('case', cases)
def test_several_processes_agree(launches, n, case): check(launches, n, case)

def test_a_snapshot_leaves_modules_and_classes_alone():
    "Also where a package has a class of its own for its module, as lazy ones have"
    import types
    from fastaccum.memory.snapshot import Snapshot
    mod = type('Lazy', (types.ModuleType,), {'__module__':'somewhere'})('lazy')
    cls = type('A', (), {'xs':[]})
    snap = Snapshot([mod,cls])
    mod.x,cls.y = 1,2
    cls.xs.append(1)
    snap.put_back()
    assert (mod.x,cls.y,cls.xs)==(1,2,[1])
