"The finder of accum_bs: the right size where it is known, branches that are fits, and a Learner that is as it was."
import copy, random, warnings
import numpy as np, pytest, torch
from torch import nn
from torch.utils.data import TensorDataset
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastcore.basics import noop
from fastaccum import GradientAccumulation, NoiseScale, ScaledLR
from fastaccum.accum_find import FoundAccum
from fastaccum.noise.branch import lost
from fastaccum.noise.spread import ratio
from fastaccum.noise.stretch import Stream, Stretch
from fastaccum.testing import CrossEntropy, Float32Loss, deviation, toy, toy_data
from common import CpuMixedPrecision, Raise, weights

def find(learn, mode='noise', **kwargs): return learn.accum_find(mode, show_plot=False, **kwargs)

# A noisy quadratic, ½|θ-x|² with x around 0: the gradient of a sample is θ-x, tr Σ that of x, and all is known

class Theta(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.theta = nn.Parameter(torch.full((d,), d**-.5, dtype=torch.float64))   # |G|² = 1
    def forward(self, x): return self.theta-x

def half_square(pred, targ): return pred.square().sum(-1).mean()/2

def quadratic(scale, bs, seed=0, d=200, n=4096):
    "A Learner whose noise scale is `scale`"
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)*(scale/d)**.5
    random.seed(seed)
    ds = TensorDataset(x, torch.zeros(n))
    dls = DataLoaders(DataLoader(ds, bs=bs, shuffle=True, drop_last=True), DataLoader(ds, bs=bs))
    learn = Learner(dls, Theta(d), half_square, opt_func=SGD, wd=0.)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

B,b = 64,4

@pytest.mark.parametrize('lr', [0.,.002])
@pytest.mark.parametrize('seed', range(3))
def test_noise_finds_the_scale(seed, lr):
    "Standing still and moving; 60 steps of 32 samples know it within 10 % or so"
    found = find(quadratic(B, b, seed), steps=60, lr=lr)
    assert B/1.5<int(found)<B*1.5 and found.low<found.scale<found.high, found

def test_noise_in_the_learners_own_steps():
    "The steps of the Learner's own accumulation are those that are measured"
    learn = quadratic(B, b)
    learn.add_cb(GradientAccumulation(40))
    found = find(learn, steps=50, lr=0.)
    assert found.size==40 and {o.samples for o in found.readings}=={40} and len(found.readings)==50
    assert B/1.5<int(found)<B*1.5

def after(size, lr, n):
    "What is expected of |θ|² after `n` samples in steps of `size`, with noise of B"
    res = 1.
    for _ in range(round(n/size)): res = (1-lr)**2*res+lr**2*B/size
    return res

def exact_loss(size, lr, n):
    "What steps of `size` lose against steps of b, as a share of the progress, when `lr` grows in proportion"
    return (after(size, lr*size/b, n)-after(b, lr, n))/(1-after(b, lr, n))

def critical(lr, n, tol=.1):
    "The size at which that is `tol`"
    sizes = np.geomspace(b, n, 500)
    def loss(size):   # between whole numbers of steps
        at = n/size
        lo,hi = n/np.ceil(at),n/np.floor(at)
        return np.interp(size, [lo,hi], [exact_loss(o, lr, n) for o in (lo,hi)]) if hi>lo else exact_loss(lo, lr, n)
    return next(o for o in sizes if loss(o)>tol)

@pytest.mark.parametrize('lr', [.027,.04,.06])
@pytest.mark.parametrize('seed', range(2))
def test_branches_find_the_critical_size(seed, lr):
    "Which is known exactly, and is the noise scale at the first of these learning rates"
    n,sizes = 512,6
    found = find(quadratic(B, b, seed), 'branch', sizes=sizes, steps=n//(b*2**(sizes-1)), lr=lr, looks=256)
    size = critical(lr, n)
    assert size/1.5<int(found)<size*1.5, (size, found)
    if lr==.027: assert B/1.5<size<B*1.5 and B/1.5<int(found)<B*1.5
    for i,o in enumerate(found.branches):
        share,err = lost(found, i)
        assert abs(share-exact_loss(o.size, lr, n))<.05+.3*exact_loss(o.size, lr, n), (o.size, share)

def test_a_rate_that_is_small_loses_nothing():
    found = find(quadratic(B, b), 'branch', sizes=4, steps=4, lr=.002)
    assert int(found)==32 and 'larger was not tried' in repr(found)

# A branch is a fit

last = {}   # after each fit: its number of steps -> weights

class Weights(Callback):
    "Notes the weights after training, for the test"
    order = 20
    def after_train(self): last.setdefault(len(last), weights(self.learn))

def small(seed=0, opt_func=SGD, cbs=(), bs=4, n=50, **kwargs):
    torch.manual_seed(seed)
    random.seed(seed)
    ds = toy_data(n)
    dls = DataLoaders(DataLoader(ds, bs=bs, shuffle=True), DataLoader(ds, bs=8))
    net = nn.Sequential(nn.Linear(5,6), nn.Dropout(.3), nn.Tanh(), nn.Linear(6,3)).double()
    learn = Learner(dls, net, CrossEntropy(), opt_func=opt_func, cbs=[Float32Loss(),*cbs], **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

class Fresh:
    "The training loader of a separate fit: the full batches of `dl`, `n` of them"
    def __init__(self, dl, n): self.dl,self.n_batches,self.bs,self.n,self.drop_last = dl,n,dl.bs,n*dl.bs,False
    def __len__(self): return self.n_batches
    def __iter__(self):
        left = self.n_batches
        while True:
            for x in self.dl:
                if len(x[0])<self.bs: continue
                if not left: return
                left -= 1
                yield x
    def __getattr__(self, nm):
        if nm=='dl': raise AttributeError(nm)
        return getattr(self.dl, nm)

@pytest.mark.parametrize('opt,rule', [(SGD,'linear'),(Adam,'sqrt'),(SGD,'adascale')])
@pytest.mark.parametrize('fitted', [False,True])
def test_each_branch_is_a_separate_fit(opt, rule, fitted):
    "Weights agree to the bit: from the same weights and optimizer, on the same samples, with the same dropout"
    def make():
        learn = small(opt_func=opt)
        if fitted: learn.fit(1, .05)
        torch.manual_seed(7)
        return learn
    last.clear()
    learn = make()
    learn.add_cb(Weights())
    found = find(learn, 'branch', sizes=3, steps=3, lr=.05, rule=rule if rule=='adascale' else None, looks=5)
    ends = [last[2*i] for i in range(3)]   # a look follows each
    assert [(o.size,o.steps) for o in found.branches]==[(4,12),(8,6),(16,3)]
    for size,end in zip((4,8,16), ends):
        learn = make()
        learn.dls.train = Fresh(learn.dls.train, 12)
        cbs = [GradientAccumulation(size, drop_last=False)]
        if size>4: cbs += [ScaledLR(4, rule)]+[NoiseScale(1)]*(rule=='adascale')
        learn.fit(1, .05, cbs=cbs)
        assert deviation(weights(learn), end)==0, size

# The Learner's accumulation splits the batches of the loader

def split(micro, accum_bs=16, cap=None, **kwargs):
    "A Learner whose loader yields 16 samples; with more than `cap` at once memory runs out"
    learn = small(bs=16, cbs=[GradientAccumulation(accum_bs, micro_batch_size=micro)], n=100, **kwargs)
    learn.model[1].p = 0.
    if cap: learn.model.register_forward_pre_hook(lambda m,x: full() if len(x[0])>cap else None)
    return learn

def full(): raise torch.OutOfMemoryError('planted')

def test_sizes_are_whole_micro_batches():
    learn = quadratic(16, 64)
    learn.add_cb(GradientAccumulation(64, micro_batch_size=4))
    found = find(learn, lr=0.)
    assert found.size==64 and len(found.readings)==20 and 16/1.5<int(found)<16*1.5 and int(found)%4==0
    found = find(learn, 'branch', accum_bs=4, sizes=3, steps=4)
    assert [(o.size,o.steps) for o in found.branches]==[(4,16),(8,8),(16,4)]

@pytest.mark.parametrize('micro', [4,5,'auto'])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_branches_of_batches_that_are_split(micro):
    "They are those of whole batches, although memory runs out with more than 5 samples, also when losses are looked at"
    a,b = (find(split(m, cap=cap), 'branch', sizes=2, steps=2, lr=.05) for m,cap in ((None,None),(micro,5)))
    assert [(o.size,o.steps) for o in b.branches]==[(16,4),(32,2)] and abs(a.start-b.start)<1e-6
    assert all(np.abs(x.losses-y.losses).max()<1e-6 for x,y in zip(a.branches, b.branches))

@pytest.mark.parametrize('mode', ['noise','branch'])
@pytest.mark.parametrize('micro,accum_bs', [(4,4),(3,6),(5,20),('auto',32)])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_split_and_everything_is_as_it_was(mode, micro, accum_bs):
    learn = split(micro, accum_bs, 5)
    before,own = everything(learn),learn.gradient_accumulation.micro
    find(learn, mode, steps=2, **(dict(sizes=3) if mode=='branch' else {}))
    assert_untouched(before, learn)
    assert own.size is None and own.fit is None

def test_looks_are_the_same_for_all():
    "Losses after a branch are those of the samples that come next, with no step between"
    learn = small()
    found = find(learn, 'branch', sizes=2, steps=2, lr=0., looks=6)
    a,b = found.branches
    assert np.array_equal(a.losses, b.losses) and len(a.losses)==6 and a.above(b)==(0.,0.)
    found = find(quadratic(64, 4), 'branch', sizes=2, steps=2, lr=0., looks=6)   # without dropout
    assert abs(found.start-found.branches[0].loss)<1e-12   # and so is the loss before

def test_own_scaling_is_the_rule():
    learn = small(cbs=[ScaledLR(2, 'sqrt')])
    found = find(learn, 'branch', sizes=2, steps=2)
    assert found.rule=='sqrt' and 'with the root' in repr(found) and learn.scaled_lr.base_bs==2
    assert find(learn, 'branch', sizes=2, steps=2, rule='linear').rule=='linear'
    assert find(small(opt_func=Adam), 'branch', sizes=2, steps=2).rule=='sqrt'

# Everything is as it was

def everything(learn):
    "What a search may touch, in a form that can be compared"
    return dict(weights=[o.detach().clone() for o in learn.model.state_dict().values()],
        grads=[None if p.grad is None else p.grad.clone() for p in learn.model.parameters()],
        opt=learn.opt and copy.deepcopy(learn.opt.state_dict()), hypers=learn.opt and copy.deepcopy(learn.opt.hypers),
        cbs=list(learn.cbs), names=sorted(vars(learn)), recorder={k:copy.copy(v) for k,v in vars(learn.recorder).items()
            if isinstance(v, (list,int,float))}, loader=learn.dls.train, order=learn.dls.train.rng.getstate(),
        rng=(torch.get_rng_state(),random.getstate(),str(np.random.get_state())), metrics=list(learn.metrics),
        hooks=[list(p._backward_hooks or ()) for p in learn.model.parameters()], training=learn.model.training)

def same(a, b):
    if isinstance(a, torch.Tensor): return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(same, a, b))
    return a is b or a==b

def assert_untouched(before, learn):
    now = everything(learn)
    off = [k for k in before if not same(before[k], now[k])]
    assert not off, off

def fitted(cbs=()):
    learn = small(cbs=[GradientAccumulation(8), NoiseScale(1), *cbs], opt_func=Adam, n=48)
    learn.fit(1)
    return learn

@pytest.mark.parametrize('mode', ['noise','branch'])
@pytest.mark.parametrize('make', [small, fitted, lambda: fitted([CpuMixedPrecision()])], ids=['fresh','fitted','mixed'])
def test_everything_is_as_it_was(mode, make):
    "And the fit that follows is the one that would have been"
    learn,other = make(),make()
    for o in (learn,other): torch.manual_seed(3); random.seed(3); np.random.seed(3)
    before = everything(learn)
    found = find(learn, mode, steps=3, **(dict(sizes=2) if mode=='branch' else {}))
    assert_untouched(before, learn)
    assert isinstance(found, FoundAccum) and int(found)%4==0
    torch.manual_seed(3)
    learn.fit(1); torch.manual_seed(3); other.fit(1)
    assert deviation(weights(learn), weights(other))==0

@pytest.mark.parametrize('mode', ['noise','branch'])
@pytest.mark.parametrize('event', ['before_fit','before_batch','after_loss','before_step','after_step','after_train',
    'after_fit'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,ZeroDivisionError])
def test_interrupt(mode, event, exc):
    learn = fitted()
    before = everything(learn)
    with pytest.raises(exc): find(learn, mode, steps=2, cbs=Raise(event, exc, 20))
    assert_untouched(before, learn)

# Arguments, loaders, results

@pytest.mark.parametrize('kwargs,exc,says', [(dict(mode='nois'), ValueError, "mode='nois'"),
    (dict(steps=0), ValueError, 'steps=0'), (dict(steps=2.5), TypeError, 'steps=2.5'),
    (dict(accum_bs=-4), ValueError, '-4'),
    (dict(mode='branch', sizes=True), TypeError, 'sizes=True'), (dict(mode='branch', looks=0), ValueError, 'looks=0'),
    (dict(mode='branch', rule='cube'), ValueError, "rule='cube'"), (dict(metric='lamb'), ValueError, "metric='lamb'"),
    (dict(mode='branch', tol=2), ValueError, 'tol=2'), (dict(mode='branch', tol='a'), TypeError, "tol='a'")])
def test_bad_arguments(kwargs, exc, says):
    "They fail before a batch is read"
    learn = fitted()
    before = everything(learn)
    with pytest.raises(exc, match=says): find(learn, **kwargs)
    assert_untouched(before, learn)

def test_show_plot_is_a_bool():
    with pytest.raises(TypeError, match='show_plot=1'): small().accum_find(show_plot=1)

def test_several_processes_are_refused(monkeypatch):
    from torch import distributed
    monkeypatch.setattr(distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed, 'get_world_size', lambda *a: 2)
    with pytest.raises(RuntimeError, match='in 2 processes'): find(small())

def test_a_loader_without_samples_or_size():
    learn = small()
    learn.dls.train.bs = None
    with pytest.raises(ValueError, match='batch size'): find(learn)
    learn = small(n=3, bs=4)
    learn.dls.train.drop_last = True
    with pytest.raises(ValueError, match='no batch'): find(learn)
    with pytest.raises(RuntimeError, match='no full batch of 4'): find(small(n=3, bs=4))

@pytest.mark.parametrize('mode', ['noise','branch'])
def test_who_ends_the_fit_is_told(mode):
    class Stop(Callback):
        def after_step(self): raise CancelFitException
    learn = small()
    with pytest.raises(RuntimeError, match='a callback ends the fit'): find(learn, mode, cbs=Stop())
    assert learn.opt is None and not any(isinstance(o, Stop) for o in learn.cbs)

@pytest.mark.parametrize('mode', ['noise','branch'])
def test_nothing_is_validated(mode):
    seen = []
    class Validates(Callback):
        def before_validate(self): seen.append(1)
    find(small(), mode, steps=2, cbs=Validates())
    assert not seen

def test_pytorch_loaders():
    learn = small()
    gen = torch.Generator().manual_seed(0)
    learn.dls = DataLoaders(torch.utils.data.DataLoader(toy_data(50), 4, shuffle=True, generator=gen), learn.dls.valid)
    state = gen.get_state()
    a,b = find(learn, 'branch', sizes=2, steps=4, lr=0.).branches
    assert np.array_equal(a.losses, b.losses) and gen.get_state().equal(state)
    assert find(learn, steps=3).size==32

def test_optim_wrapper():
    learn = small(opt_func=lambda ps, **kw: OptimWrapper(ps, torch.optim.Adam, **kw))
    assert find(learn, 'branch', sizes=2, steps=2).rule=='sqrt'

def test_tokens_are_turned_into_samples():
    "The noise scale is in targets, the suggestion in samples"
    ds = toy_data(60, tokens=True)
    found = find(toy(4, data=ds), lr=0., steps=10)
    assert found.unit=='targets' and 1<found.per_sample<6
    targets = found.scale if np.isfinite(found.scale) else found.low
    assert targets>0 and abs(found.best*found.per_sample-targets)<1e-9*targets

def test_hidden_by_noise():
    "Where the gradient is not told from 0, the suggestion is the lower bound"
    found = find(quadratic(1e9, 4), steps=4, lr=0.)
    assert found.high==np.inf and int(found)>100 and 'or more' in repr(found)

def test_no_more_than_an_epoch():
    found = find(quadratic(1e4, 4, n=300), steps=20, accum_bs=256, lr=0.)
    assert int(found)==300 and found.capped and 'no more samples' in repr(found)

def test_progress_is_shown(monkeypatch):
    from fastaccum.noise import excursion
    bars = []
    class Bar:
        def __init__(self, gen, **kwargs): self.n,self.at,self.ended = len(gen),[],0; bars.append(self)
        def update(self, i): self.at.append(i)
        def on_iter_end(self): self.ended += 1
    monkeypatch.setattr(excursion, 'progress_bar', Bar)
    learn = small()
    learn.add_cb(ProgressCallback())
    find(learn, 'branch', sizes=2, steps=2)
    find(learn, steps=2)
    for o in bars: assert o.at==list(range(o.n+1)) and o.ended==1
    assert [o.n for o in bars]==[3*(4+8),16]

@pytest.mark.parametrize('mode', ['noise','branch'])
def test_plot_and_words(mode):
    from matplotlib import pyplot as plt
    learn = small()
    n = len(plt.get_fignums())
    found = learn.accum_find(mode, steps=2)
    assert len(plt.get_fignums())==n+1
    assert f'accum_bs={int(found)}' in repr(found) and 'taken for granted' in repr(found)
    plt.close('all')

def test_bounds_hold_the_ratio():
    "19 of 20 times or so, whether the denominator is known well or not"
    rng = np.random.default_rng(0)
    for noise in (.5,2.,8.):
        got = [ratio(rng.normal(10, 2, 30), rng.normal(2, noise, 30)) for _ in range(400)]
        assert .91<np.mean([low<=5<=high for _,low,high in got])<=1.
    got = [ratio(10+2*z, 2-.4*z+rng.normal(0, .1, 30)) for z in rng.normal(0, 1, (1000,30))]   # of one step
    assert .91<np.mean([low<=5<=high for _,low,high in got])<=1.
    assert ratio(np.ones(1), np.ones(1))==(1.,0.,np.inf)

def test_a_stream_that_is_closed_lets_the_loader_go():
    ended = []
    def batches():
        try:
            while True: yield torch.zeros(4, 2),torch.zeros(4)
        finally: ended.append(True)
    class Loader:
        def __iter__(self): return batches()
    stream = Stream(Loader(), 4)
    next(iter(Stretch(stream, 2)))
    assert ended==[]
    stream.close()
    assert ended==[True]
