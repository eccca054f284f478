"""`micro_batch_size='auto'`: memory runs out in the middle of a fit, and the run is still the big batch's.

The model, the loss or the optimizer raises `torch.OutOfMemoryError` above a number of samples, or at a moment of our
choice.
"""
import pytest, random, subprocess, sys, warnings
import numpy as np, torch
from functools import partial
from pathlib import Path
from torch import nn
from fastai.callback.core import Callback, CancelBatchException, CancelValidException
from fastai.callback.training import GradientClip
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.memory.recovery import AutoSize
from fastaccum.testing import Float32Loss, assert_twins, deviation, toy, twins
from common import InBackward, Raise, Seen, grads, short_of, weights
from test_precision import Scaled

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out')

class Capped(nn.Module):
    "Three layers; runs out of memory with more than `cap` samples, if `on`"
    cap,where,on = 3,'forward',False
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer('calls', torch.tensor(0))
    def limit(self): return self.cap if self.on and self.training else float('inf')
    def forward(self, x):
        self.calls += 1
        for i,o in enumerate(self.layers):
            if i==2 and self.where=='backward':
                x = InBackward.apply(x, short_of(self.limit()))   # layers 2 to 4 have their gradients by then
            if i==2 and self.where=='forward' and len(x)>self.limit(): raise torch.OutOfMemoryError('planted, forward')
            x = o(x)
        return x

def model(cap=3, where='forward', norm=False):
    m = Capped(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.BatchNorm1d(6) if norm else nn.Tanh(),
        nn.Linear(6,3)).double()
    m.cap,m.where = cap,where
    return m

def splitter(m): return [list(m.layers[:2].parameters()),list(m.layers[2:].parameters())]

class Switch(Callback):
    "Memory is short in the run with accumulation"
    order = -50
    def before_fit(self): self.model.on = hasattr(self, 'gradient_accumulation')
    def after_loss(self):
        m = self.model
        if m.where=='loss' and self.training and len(self.pred)>m.limit(): raise torch.OutOfMemoryError('planted, loss')

def short(cap=3, where='forward', micro=16, macro=32, fit=lambda l,cbs: l.fit_one_cycle(2, 0.1, cbs=cbs), acc=None,
        cbs=list, norm=False, **kwargs):
    "Twins, of which the one with accumulation has memory for `cap` samples"
    a,b = twins(micro=micro, macro=macro, model=partial(model, cap, where, norm), splitter=splitter, fit=fit,
                acc={'micro_batch_size':'auto', **(acc or {})}, cbs=lambda: [Switch()]+cbs(), **kwargs)
    for o in (a,b): o.model.calls.zero_()   # (as many as there were forward passes)
    return a,b

@pytest.mark.parametrize('where', ['forward','loss','backward'])
@pytest.mark.parametrize('n', [96,90])
@pytest.mark.parametrize('kwargs', [dict(), dict(micro=32), dict(micro=8, macro=20), dict(cap=1), dict(cap=5),
    dict(cap=8), dict(shuffle=True, opt_func=Adam),
    dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), dict(acc=dict(drop_last=True)),
    dict(cbs=lambda: [GradientClip(0.05)]),
    dict(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3)]), dict(metrics=accuracy), dict(tokens=True)],
    ids=str)
def test_twins(where, n, kwargs): assert_twins(*short(where=where, n=n, **kwargs))

@pytest.mark.parametrize('cap', range(1, 20))
def test_every_cap(cap):
    a,b = short(cap, random.Random(cap).choice(['forward','loss','backward']), micro=20, macro=40, n=90)
    assert_twins(a, b)

def test_the_size_is_found_by_halving_and_kept():
    sizes = Seen('after_pred', lambda l: len(l.pred))
    acc = GradientAccumulation(32, micro_batch_size='auto')
    learn = toy(16, n=48, model=partial(model, 5), splitter=splitter)
    text = 'memory ran out with a micro-batch of 16 samples .planted, forward.*in micro-batches of 4'
    with pytest.warns(UserWarning, match=text) as got:
        for _ in range(2): learn.fit(1, 0.1, cbs=[acc,Switch(),sizes])
    assert len([o for o in got if 'memory ran out' in str(o.message)])==1
    assert sizes.values==[4]*24 and acc.micro.size==4

@pytest.mark.parametrize('where', ['forward','loss','backward'])
@pytest.mark.parametrize('seed', range(6))
def test_at_random_moments(where, seed):
    "Memory is short for some micro-batches only, in the middle of the fit"
    rng = random.Random(seed)
    moments = {rng.randrange(24) for _ in range(4)}
    class Sometimes(Callback):
        order,run_valid,n = -40,False,-1
        def before_batch(self):
            if self.model.on and len(self.y)>=4: self.n += 1
            self.model.cap = 2 if self.n in moments else 100
    a,b = short(where=where, n=rng.randint(80, 100), micro=8, macro=24, cbs=lambda: [Sometimes()],
        fit=lambda l,cbs: l.fit_one_cycle(3, 0.1, cbs=cbs))
    assert b.model.on
    assert_twins(a, b)

def test_schedules():
    "A schedule's twin is the same schedule with enough memory"
    learns = []
    for on in (False,True):
        learn = toy(8, n=90, model=partial(model, 3), splitter=splitter)
        acc = GradientAccumulationSchedule(8, 32, finish=0.5, micro_batch_size='auto' if on else None)
        learn.fit_one_cycle(2, 0.1, cbs=[acc]+([Switch()] if on else []))
        learn.model.calls.zero_()
        learns.append(learn)
    assert_twins(*learns)
    assert learns[0].recorder.accum_bs==learns[1].recorder.accum_bs

def test_train_metrics():
    def make(*args, **kwargs):
        learn = toy(*args, metrics=accuracy, **kwargs)
        learn.recorder.train_metrics = True
        return learn
    assert_twins(*short(make=make, n=90))

def test_lr_find():
    def fit(l, cbs):
        l.add_cbs(cbs)
        l.lr_find(num_it=20, show_plot=False)
    a,b = short(n=90, fit=fit)
    assert len(b.recorder.lrs)==20 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

@pytest.mark.parametrize('opt', [partial(SGD, mom=0.9), Adam, partial(OptimWrapper, opt=torch.optim.AdamW)])
@pytest.mark.parametrize('scaled', [False,True])
def test_the_first_step_of_the_optimizer(opt, scaled):
    "It fails when half of the parameters have moved, and is tried again; no step is repeated"
    steps = []
    def make(*args, **kwargs):
        learn = toy(*args, **kwargs)
        learn.create_opt()
        stock,inner = learn.opt.step,learn.opt
        def step(*args, **kwargs):
            steps.append(learn.model.on)
            if learn.model.on and sum(steps)==1:
                some = learn.model.layers[4].weight
                grad,some.grad = some.grad,None
                stock()               # all but one parameter
                some.grad = grad
                raise torch.OutOfMemoryError('planted, step')
            stock(*args, **kwargs)
        inner.step = step
        return learn
    cbs = (lambda: [Scaled(init_scale=2.**10, growth_interval=3)]) if scaled else list
    a,b = short(cap=100, make=make, opt_func=opt, n=90, cbs=cbs)
    assert sum(steps)==2*3+1
    assert_twins(a, b)

def test_a_later_step_that_fails_says_that_it_cannot_be_undone():
    learn = toy(16, n=64, model=model, splitter=splitter)
    learn.create_opt()
    stock,n = learn.opt.step,[0]
    def step():
        n[0] += 1
        if n[0]==2: raise torch.OutOfMemoryError('planted')
        stock()
    learn.opt.step = step
    with pytest.raises(torch.OutOfMemoryError, match='not the first.*load the last saved model.*planted'):
        learn.fit(1, 0.1, cbs=GradientAccumulation(32, micro_batch_size='auto'))

def test_a_single_sample_that_does_not_fit():
    learn = toy(16, n=64, model=partial(model, 0), splitter=splitter)
    before = weights(learn)
    with pytest.raises(torch.OutOfMemoryError, match='a single sample does not fit: planted, forward'):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),Switch()])
    assert weights(learn).equal(before) and not {'one_batch','_do_one_batch','_step'}&vars(learn).keys()

@pytest.mark.parametrize('exc', [RuntimeError,KeyboardInterrupt,CancelBatchException])
def test_other_errors_pass(exc):
    learn = toy(16, n=64, model=model, splitter=splitter)
    cbs = [GradientAccumulation(32, micro_batch_size='auto'),Raise('after_pred', exc, 0, at=1)]
    if exc is CancelBatchException: learn.fit(1, 0.1, cbs=cbs)
    else:
        with pytest.raises(exc, match='planted'): learn.fit(1, 0.1, cbs=cbs)
    assert not {'one_batch','_do_one_batch','_step'}&vars(learn).keys() and not any(g is not None and g.any() for g in grads(learn))

def test_what_comes_after_the_gradient_was_counted_is_not_tried_again():
    learn = toy(16, n=64, model=model, splitter=splitter)
    with pytest.raises(torch.OutOfMemoryError):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),
            Raise('after_batch', torch.OutOfMemoryError, 70)])

@pytest.mark.parametrize('draw', [random.random, np.random.rand, lambda: torch.rand(1).item()],
    ids=['python','numpy','torch'])
@pytest.mark.parametrize('cap', [3,100])
def test_random_numbers(draw, cap):
    "A failed attempt draws nothing: what comes after is as in a run with smaller micro-batches to begin with"
    class Draw(Callback):
        order,run_valid = -55,False   # before `Switch`, which fails in `after_loss`
        def before_fit(self): self.seen = []
        def after_pred(self):
            x = draw()
            if len(self.y)<=self.model.limit(): self.seen.append(x)
    seen = []
    for micro,on in ((2,False),(16,True)):
        learn,cb = toy(micro if cap<16 else 16, n=64, model=partial(model, cap, 'loss'), splitter=splitter),Draw()
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        acc = GradientAccumulation(32, **(dict(micro_batch_size='auto') if on else {}))
        learn.fit(1, 0.1, cbs=[acc,cb]+([Switch()] if on else []))
        seen.append(cb.seen)
    assert seen[0]==seen[1]

def test_batchnorm_and_other_buffers():
    "Statistics are those of a run with smaller micro-batches to begin with"
    learns = []
    for micro,acc in ((2,{}),(16,dict(micro_batch_size='auto'))):
        learn = toy(micro, n=64, model=partial(model, 3, 'backward', True), splitter=splitter)
        learn.fit(2, 0.1, cbs=[GradientAccumulation(32, **acc)]+([Switch()] if acc else []))
        learns.append(learn)
    a,b = learns
    assert a.model.calls==b.model.calls and a.model.layers[3].num_batches_tracked==b.model.layers[3].num_batches_tracked
    assert_twins(a, b, loss_tol=1e-6)

def test_autocast_is_left():
    class Autocast(Callback):
        order,run_valid = 10,True
        def before_batch(self):
            self.ctx = torch.autocast('cpu', torch.bfloat16)
            self.ctx.__enter__()
        def after_loss(self): self.ctx.__exit__(None, None, None)
    learn = toy(16, n=64, model=partial(model, 3), splitter=splitter)
    depth = Seen('before_batch', lambda l: (torch.is_autocast_enabled('cpu'), torch.autocast_increment_nesting()-1,
        torch.autocast_decrement_nesting()), order=5)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),Switch(),Autocast(),depth])
    assert {o[:2] for o in depth.values}=={(False,0)} and not torch.is_autocast_enabled('cpu')

# Batches of other kinds

class Structured(nn.Module):
    "Inputs in a dict and a tuple"
    def __init__(self):
        super().__init__()
        self.lin,self.on = nn.Linear(5,3).double(),False
    def forward(self, d, t):
        if self.on and len(t[0])>3: raise torch.OutOfMemoryError('planted')
        return self.lin(d['a'])+self.lin(t[0])

def structured(bs, on, item=lambda x,y,i: ({'a':x},(x,x),y)):
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    gen = torch.Generator().manual_seed(0)
    items = [item(torch.randn(5, generator=gen, dtype=torch.float64),
        torch.randn(3, generator=gen, dtype=torch.float64), i) for i in range(50)]
    torch.manual_seed(0)
    dl = torch.utils.data.DataLoader(items, bs)
    dls = DataLoaders(dl, dl)
    dls.n_inp = 2
    def loss(p, y): return nn.functional.mse_loss(p, y[0] if isinstance(y, (list,tuple)) else y)
    learn = Learner(dls, Structured(), loss, opt_func=SGD, cbs=Float32Loss())
    learn.remove_cb(learn.progress)
    learn.logger,learn.model.on = (lambda *_: None),on
    return learn

def test_nested_batches():
    a,b = structured(20, False),structured(10, True)
    a.fit(1, 0.1)
    b.model.on = True
    class Off(Callback):
        def before_validate(self): self.model.on = False
    b.fit(1, 0.1, cbs=[GradientAccumulation(20, micro_batch_size='auto'),Off()])
    assert deviation(weights(a), weights(b))<1e-12

def test_what_cannot_be_split_is_refused_before_a_weight_moves():
    learn = toy(16, n=64, model=model, splitter=splitter)
    class Odd:
        shape = (16,)
        def flatten(self, *args): return torch.zeros(16, dtype=torch.long)
    class Loader:
        bs,device,dataset,n,after_batch = 16,torch.device('cpu'),[0]*64,64,None
        def __len__(self): return 4
        def __iter__(self): return iter([(torch.randn(16, 5, dtype=torch.float64),Odd())]*4)
    learn.dls.loaders[0] = Loader()
    before = weights(learn)
    with pytest.raises(TypeError, match=r"a Odd in a batch of 16 samples cannot be split.*AutoSize\(split=f\)"):
        learn.fit(1, 0.1, cbs=GradientAccumulation(32, micro_batch_size='auto'))
    assert weights(learn).equal(before)

def test_own_split():
    calls = []
    def split(b, start, stop, n):
        calls.append((start,stop,n))
        return tuple(o[start:stop] for o in b)
    a,b = short(n=90, acc=dict(micro_batch_size=AutoSize(split=split)))
    assert_twins(a, b)
    assert calls[0]==(0,1,16) and (0,2,16) in calls

def test_validation_is_split_too():
    "With a size of its own; metrics and losses are the twin's"
    class Evaluated(Capped):
        valid_cap = 9
        def limit(self): return super().limit() if self.training else self.valid_cap if self.on else float('inf')
    def make_model():
        m = Evaluated(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()
        m.cap = 5
        return m
    acc = GradientAccumulation(32, micro_batch_size='auto')
    a,b = (toy(16, n=90, model=make_model, splitter=splitter, metrics=accuracy) for _ in range(2))
    a.fit_one_cycle(2, 0.1, cbs=GradientAccumulation(32))
    with pytest.warns(UserWarning) as told: b.fit_one_cycle(2, 0.1, cbs=[acc,Switch()])
    assert [str(o.message).split('\n')[0].split()[-1] for o in told if 'memory ran out' in str(o.message)]==['4','8']
    assert (acc.micro.size,acc.micro.valid_size)==(4,8)
    for o in (a,b): o.model.calls.zero_()
    assert_twins(a, b)

def test_a_validation_that_ends_in_the_middle_of_a_batch():
    "Training goes on with whole batches: none of them is taken for a part of one"
    class Evaluated(Capped):
        def limit(self): return 9 if self.on and not self.training else float('inf')
    def make_model(): return Evaluated(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()
    a,b = (toy(16, n=90, model=make_model, splitter=splitter) for _ in range(2))
    a.fit_one_cycle(3, 0.1, cbs=GradientAccumulation(32))
    class Stop(Callback):
        order = 70
        def after_batch(self):
            if not self.training: raise CancelValidException
    b.fit_one_cycle(3, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),Switch(),Stop()])
    assert deviation(weights(a), weights(b))<1e-12 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

def test_a_failure_is_not_told_in_the_next_fit():
    acc = GradientAccumulation(32, micro_batch_size='auto')
    learn = toy(16, n=64, model=partial(model, 0), splitter=splitter)
    with pytest.raises(torch.OutOfMemoryError): learn.fit(1, 0.1, cbs=[acc,Switch()])
    learn.model.on = False
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        learn.fit(1, 0.1, cbs=acc)

def test_a_metric_that_runs_out_of_memory_is_not_asked_twice():
    learn = toy(16, n=64, model=model, splitter=splitter)
    class Out(Callback):
        order = 70
        def after_batch(self):
            if not self.training: raise torch.OutOfMemoryError('planted')
    with pytest.raises(torch.OutOfMemoryError):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),Out()])

def test_it_is_off_outside_of_the_fit():
    learn = toy(16, n=64, model=model, splitter=splitter, cbs=GradientAccumulation(32, micro_batch_size='auto'))
    learn.fit(1, 0.1)
    assert not {'one_batch','_do_one_batch','_step'}&vars(learn).keys()
    learn.add_cb(Switch())
    learn.model.on = True
    learn.validate()

def test_the_size_is_logged(tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    learn = toy(16, n=64, model=partial(model, 5), splitter=splitter)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),Switch(),
        TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)])
    assert [o.value for o in EventAccumulator(str(tmp_path)).Reload().Scalars('micro_batch_size')]==[4.,4.]

def test_gradients_are_the_same_to_the_last_bit():
    learns = [toy(8, n=90, tokens=True) for _ in range(2)]
    for learn,size in zip(learns, (None,'auto')):
        learn.fit_one_cycle(2, 0.1, cbs=GradientAccumulation(24, micro_batch_size=size))
    assert weights(learns[0]).equal(weights(learns[1]))

# A real limit

real = '''
import resource, sys, warnings, torch, psutil, os
warnings.filterwarnings('ignore')
from torch import nn
from fastaccum import GradientAccumulation
from fastaccum.testing import Float32Loss, deviation, toy
torch.set_num_threads(1)
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5, 8),nn.Linear(8, 3)
    def forward(self, x):
        h = self.a(x).tanh()
        h = h[:,:,None].expand(-1, -1, 20_000)*1.   # 1.28 MB a sample, several times
        return self.b((h*h).tanh().mean(-1))
def run(bs, cbs, limit):
    learn = toy(bs, n=192, model=lambda: Wide().double(), splitter=lambda m: [list(m.parameters())])
    learn.dls.valid.bs = 4
    if limit:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used+limit, resource.RLIM_INFINITY))
    try: learn.fit_one_cycle(2, 0.1, cbs=cbs)
    finally: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return learn
toy(4).fit(1, 0.1)
limit = 150*2**20
big = run(64, [], None)
try: run(64, [], limit)
except RuntimeError as e: print('plain:', 'DefaultCPUAllocator' in str(e))
acc = GradientAccumulation(64, micro_batch_size='auto')
auto = run(64, [acc], limit)
off = deviation(big.model.state_dict(), auto.model.state_dict())
print('size:', acc.micro.size, 'deviation:', off, len(big.recorder.losses)==len(auto.recorder.losses))
'''

@pytest.mark.skipif(sys.platform!='linux', reason='RLIMIT_AS is enforced on Linux only')
def test_real_memory():
    "The CPU's allocator fails under a limit of the address space: a plain fit ends, ours is the run that had enough"
    pytest.importorskip('psutil')
    env = {**__import__('os').environ, 'MALLOC_MMAP_THRESHOLD_':'65536', 'OMP_NUM_THREADS':'1',
        'PYTHONPATH':str(Path(__file__).parent.parent)}
    res = subprocess.run([sys.executable, '-c', real], capture_output=True, text=True, env=env, timeout=300)
    assert 'plain: True' in res.stdout, res.stdout+res.stderr
    line = res.stdout.splitlines()[-1].split()
    assert 1<=int(line[1])<64 and float(line[3])<1e-12 and line[4]=='True', res.stdout+res.stderr
