"NoiseScale measures the noise of gradients without bias, from micro-batches of any sizes, and changes nothing else."
import math
from functools import partial
from multiprocessing import get_context
import numpy as np, pytest, torch
from matplotlib import pyplot as plt
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelStepException,
    CancelTrainException)
from fastai.callback.schedule import lr_find
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation, GradientClip
from fastai.optimizer import Adam, OptimWrapper
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientCache, NoiseScale, ScaledLR
from fastaccum.testing import CrossEntropy, deviation, toy, toy_data
from common import CpuMixedPrecision, InBackward, Raise, Seen, short_of, weights

class Scaled(CpuMixedPrecision):
    "The scale of half precision, in double precision"
    def after_pred(self): pass

def scaled(**kwargs): return Scaled(**dict(init_scale=2.**10)|kwargs)
def one_group(m): return [list(m.parameters())]

def single_gradients(model, ds, loss_func=CrossEntropy()):
    "The gradient of each sample, or of each target that is not ignored"
    res = []
    for x,y in zip(*ds.tensors):
        each = [y[None]] if not y.ndim else [torch.where(torch.arange(len(y))==i, y, -100)[None]
            for i in range(len(y)) if y[i]!=-100]
        for yb in each:
            gs = torch.autograd.grad(loss_func(model(x[None]), yb), list(model.parameters()))
            res.append(torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in gs]))
    return torch.stack(res)

def by_hand(gs, sizes):
    "tr Σ and |G|² of micro-batches with these sizes, by the analysis of variance for groups of unequal size"
    mean = gs.mean(0)
    spread = sum(n*(g.mean(0)-mean).square().sum() for n,g in zip(sizes, gs.split(sizes)))
    trace = spread/(len(sizes)-1)
    return trace.item(),(mean.square().sum()-trace/sum(sizes)).item()

def clear(n, tokens=False):
    "Data with a signal: most of it is of one class"
    x,y = toy_data(n, tokens).tensors
    return TensorDataset(x, torch.where(y<0, y, (x[...,0]<-1).long()))

def learner(bs, n, **kwargs): return toy(bs, **dict(data=clear(n))|kwargs)
def told(meter): return meter.trace,meter.grad_sq
def close(a, b, rtol=1e-9): return np.allclose(a, b, rtol=rtol, atol=0)

def measure(n_epoch=1, *, n=18, accum_bs=18, bs=4, cbs=(), acc={}, every=1, **kwargs):
    "At a standstill; by default one step of four micro-batches with 4 samples and one with 2"
    learn,meter = learner(bs, n, **kwargs),NoiseScale(every=every)
    learn.fit(n_epoch, 0., wd=0., cbs=[GradientAccumulation(accum_bs, **acc), meter, *cbs])
    return learn,meter

# What is measured

class Penalty(Callback):
    "Back-propagates in the middle of everything"
    def after_pred(self):
        if self.training: torch.autograd.grad(self.pred.sum(), list(self.model.parameters()), retain_graph=True)

same = dict(plain=dict, summed=lambda: dict(loss_func=CrossEntropy(reduction='sum')),
    scaled=lambda: dict(cbs=[scaled()]),
    clipped=lambda: dict(cbs=[GradientClip(1e-3)]), scaled_and_clipped=lambda: dict(cbs=[scaled(),GradientClip(1e-3)]),
    summed_and_scaled=lambda: dict(loss_func=CrossEntropy(reduction='sum'), cbs=[scaled()]),
    adam=lambda: dict(opt_func=Adam), torchs=lambda: dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    other_backward_passes=lambda: dict(cbs=[Penalty()]), an_epoch_has_fewer=lambda: dict(accum_bs=1000))

@pytest.mark.parametrize('nm', same)
def test_what_is_measured_is_what_the_gradients_of_single_samples_say(nm):
    learn,meter = measure(**same[nm]())
    want = by_hand(single_gradients(learn.model, clear(18)), [4]*4+[2])
    assert close(told(meter), want) and 'steps of 18' in meter.verdict()
    assert learn.recorder.noise_scale==[meter.noise_scale] and close(meter.noise_scale, want[0]/want[1])

@pytest.mark.parametrize('bs,n', [(3,6),(1,9),(8,64),(3,100)])
def test_any_number_of_micro_batches(bs, n):
    (learn,meter),sizes = measure(bs=bs, n=n, accum_bs=n),[len(o) for o in torch.arange(n).split(bs)]
    assert close(told(meter), by_hand(single_gradients(learn.model, clear(n)), sizes))

def test_it_is_unbiased():
    "A hundred draws of ragged micro-batches; the variance and the mean over all samples are known"
    learn,meter = measure(100, n=38, accum_bs=38, shuffle=True)
    gs = single_gradients(learn.model, clear(38))
    trace = gs.var(0).sum().item()
    assert close(told(meter), (trace,gs.mean(0).square().sum().item()-trace/38), .05)

@pytest.mark.parametrize('cbs', [list,lambda: [scaled()]], ids=['plain','scaled'])
def test_with_padding_the_noise_is_that_of_a_target(cbs):
    ds = clear(18, tokens=True)
    ds.tensors[1][8:12] = -100   # a micro-batch with nothing to learn from is none
    learn,meter = measure(data=ds, cbs=cbs())
    sizes = [int((o!=-100).sum()) for o in ds.tensors[1].split(4)]
    want = by_hand(single_gradients(learn.model, ds), [o for o in sizes if o])
    assert close(told(meter), want, 1e-5)   # shares are in single precision where there is a scale
    assert f'steps of {sum(sizes)} ' in meter.verdict() and 'targets' in meter.verdict()

def test_own_sizes():
    "A sample that counts for two holds two things, each with twice the noise"
    (_,one),(_,two) = measure(),measure(acc=dict(size=lambda l: 2*len(l.y)))
    assert close(two.trace, 2*one.trace) and close(two.grad_sq, one.grad_sq) and 'steps of 36' in two.verdict()

class Sparse(nn.Module):
    "One layer is used twice, and one has sparse gradients"
    def __init__(self):
        super().__init__()
        self.emb,self.lin,self.out = nn.Embedding(9, 5, sparse=True),nn.Linear(5, 5),nn.Linear(5, 3)
    def forward(self, x): return self.out(self.lin(self.lin(self.emb(x).mean(1)).tanh()))

class Dense(Callback):
    "fastai's SGD cannot step on a sparse gradient"
    order = 12
    def before_step(self): self.model.emb.weight.grad = self.model.emb.weight.grad.to_dense()

def test_parameters_that_are_used_twice_or_have_sparse_gradients():
    gen = torch.Generator().manual_seed(0)
    ds = TensorDataset(torch.randint(0, 9, (18,4), generator=gen), torch.randint(0, 3, (18,), generator=gen))
    learn,meter = measure(data=ds, model=lambda: Sparse().double(), splitter=one_group, cbs=[Dense()])
    assert close(told(meter), by_hand(single_gradients(learn.model, ds), [4]*4+[2]))

def test_frozen_parameters_have_no_noise():
    learn,meter = learner(4, 18, cbs=GradientAccumulation(18)),NoiseScale(every=1)
    learn.freeze()
    learn.fit(1, 0., cbs=meter)
    learn.unfreeze()
    gs = single_gradients(learn.model, clear(18))[:,sum(p.numel() for p in learn.model[:2].parameters()):]
    assert close(told(meter), by_hand(gs, [4]*4+[2]))

def test_what_ran_out_of_memory_does_not_count():
    "The halves do, in which the micro-batch is run again"
    class Short(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 6),nn.Linear(6, 3)
        def forward(self, x): return self.b(InBackward.apply(self.a(x), short_of(2)))
    with pytest.warns(UserWarning, match='memory ran out'):
        learn,meter = measure(model=lambda: Short().double(), splitter=one_group, acc=dict(micro_batch_size='auto'))
    assert close(told(meter), by_hand(single_gradients(learn.model, clear(18)), [2]*9))

@pytest.mark.parametrize('event,exc',
    [('before_batch',CancelBatchException),('before_backward',CancelBackwardException)])
def test_micro_batches_that_a_callback_leaves_out(event, exc):
    learn,meter = measure(cbs=[Raise(event, exc, 20, at=1)], acc=dict(drop_last=False))
    gs = single_gradients(learn.model, clear(18))
    assert close(told(meter), by_hand(torch.cat([gs[:4],gs[8:]]), [4]*3+[2]))

@pytest.mark.parametrize('kind', ['fp16','bf16','parameters'])
def test_half_precision_tells_the_same_but_for_rounding(kind):
    "A scale that was forgotten would be a factor of thousands"
    def run(dtype, *cbs):
        x,y = clear(18).tensors
        net = lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
        return told(measure(data=TensorDataset(x.to(dtype), y), model=net, splitter=one_group, cbs=cbs)[1])
    half = run(torch.bfloat16) if kind=='parameters' else run(torch.float32, CpuMixedPrecision(amp_mode=kind))
    assert close(half, run(torch.float64), .1)

# Over the steps of a fit

def test_older_measurements_count_less():
    "Half as much after 20 of them"
    learn,meter = learner(4, 70),NoiseScale(every=1)
    seen = Seen('after_step', lambda l: told(meter), order=100)
    learn.fit(1, 0., wd=0., cbs=[GradientAccumulation(16), meter, seen])
    gs,sums,weight = single_gradients(learn.model, clear(70)),0,0
    for i,now in enumerate(seen.values):
        part = gs[16*i:16*i+16]
        keep = .5**(len(part)/16/20)
        sums,weight = keep*sums+(1-keep)*np.array(by_hand(part, [len(o) for o in part.split(4)])),keep*weight+1-keep
        assert close(now, sums/weight)
    assert len(seen.values)==5

def test_an_entry_a_step():
    "...of which every third is measured; each fit begins anew"
    learn = learner(4, 70, cbs=[GradientAccumulation(16), NoiseScale(every=3)])
    for _ in range(2):
        learn.fit_one_cycle(2, 1e-2)
        rec = learn.recorder.noise_scale
        assert len(rec)==len(learn.recorder.losses)==10 and rec[-1]==learn.noise_scale.noise_scale
        assert [a==b for a,b in zip(rec, rec[1:])]==[True,True,False]*3

class AtStep(Callback):
    "Something happens to the gradients of one step"
    run_valid = False
    def __init__(self, at, order, event, f):
        self.at,self.order,self.n = at,order,0
        setattr(self, event, lambda: self.hear(f))
    def after_step(self): self.n += 1
    def hear(self, f):
        if self.n==self.at: f(self.learn)

def overflow(learn): learn.loss_grad = learn.loss_grad*float('inf')
def cancel(learn): raise CancelStepException

def test_a_step_that_overflows_has_an_entry_and_is_not_measured():
    "The next one is"
    learn,meter = learner(4, 64),NoiseScale(every=1)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), scaled(), meter, AtStep(2, 9, 'before_backward', overflow)])
    rec = learn.recorder.noise_scale
    assert len(rec)==len(learn.recorder.losses)==4 and np.isfinite(rec).all()
    assert [a==b for a,b in zip(rec, rec[1:])]==[False,True,False]

@pytest.mark.parametrize('order', [9,20])
def test_a_step_that_is_cancelled_has_an_entry(order):
    learn = learner(4, 64)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), NoiseScale(every=1), AtStep(2, order, 'before_step', cancel)])
    rec = learn.recorder.noise_scale
    assert len(rec)==len(learn.recorder.losses)==4 and np.isfinite(rec).all() and rec[0]!=rec[1] and rec[2]!=rec[3]

def test_a_batch_that_grows_is_measured_from_where_it_can_be():
    learn,meter = learner(8, 64),NoiseScale(every=1)
    with pytest.warns(UserWarning, match='one micro-batch'):
        learn.fit(2, .1, cbs=[GradientAccumulationSchedule(8, 32, start=1, finish=1), meter])
    assert np.isnan(learn.recorder.noise_scale).tolist()==[True]*8+[False]*2

# Nothing else changes

@pytest.mark.parametrize('kwargs', [{},dict(data=clear(70, tokens=True)),dict(opt_func=Adam)],
    ids=['sgd','tokens','adam'])
def test_training_is_the_same_to_the_bit(kwargs):
    def run(*cbs):
        learn = learner(4, 70, **kwargs)
        learn.fit_one_cycle(2, .1, cbs=[GradientAccumulation(16), GradientClip(.5), scaled(), *cbs])
        return learn
    a,b = run(),run(NoiseScale(every=1))
    assert torch.equal(weights(a), weights(b)) and a.recorder.losses==b.recorder.losses
    assert deviation(a.opt.state_dict()['state'], b.opt.state_dict()['state'])==0 and list(b.metrics)==[]

def hooks(learn): return sum(len(p._backward_hooks or ()) for p in learn.model.parameters())

@pytest.mark.parametrize('on_learner', [False,True])
@pytest.mark.parametrize('event', ['after_loss','before_step','after_step'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,CancelTrainException])
def test_nothing_is_left_after_an_interrupt(on_learner, event, exc):
    "And the next fit measures what it would have"
    learn,meter = learner(4, 64),NoiseScale(every=1)
    own,cbs = [GradientAccumulation(16),meter],[Raise(event, exc, 20, at=2)]
    if on_learner: learn.add_cbs(own)
    try: learn.fit(1, .1, cbs=cbs if on_learner else own+cbs)
    except KeyboardInterrupt: pass
    assert cbs[0].raised and (on_learner or not hooks(learn) and list(learn.metrics)==[])
    learn.fit(1, 0., wd=0., cbs=[] if on_learner else own)
    seen = learner(4, 64)
    seen.model.load_state_dict(learn.model.state_dict())
    seen.fit(1, 0., wd=0., cbs=[GradientAccumulation(16), NoiseScale(every=1)])
    assert not hooks(learn) and list(learn.metrics)==[]
    assert len(learn.recorder.noise_scale)==4 and close(learn.recorder.noise_scale, seen.recorder.noise_scale)

def test_lr_find_and_validation_go_on():
    learn = learner(4, 64, cbs=[GradientAccumulation(16), NoiseScale(every=1)])
    learn.lr_find(num_it=6, show_plot=False)
    learn.fit(1, .1)
    before = list(learn.recorder.noise_scale)
    assert len(learn.validate())==1 and learn.recorder.noise_scale==before and len(before)==4

def test_the_host_waits_once_a_measured_step(monkeypatch):
    waits = []
    def counted(f, *args):
        waits.append(1)
        return f(*args)
    for nm in ('item','tolist','__bool__','__float__','__int__'):
        f = getattr(torch.Tensor, nm)
        monkeypatch.setattr(torch.Tensor, nm, lambda *args, f=f: counted(f, *args))
    def run(*cbs):
        learn = learner(4, 64, data=clear(64, tokens=True))
        waits.clear()
        learn.fit(1, .1, cbs=[GradientAccumulation(16), *cbs])
        return len(waits)
    assert run(NoiseScale(every=2))-run()==2

def test_loggers_get_it(monkeypatch):
    pytest.importorskip('tensorboard')
    from fastai.callback import tensorboard
    rows = []
    class Writer:
        def __init__(self, *args, **kwargs): pass
        def add_scalar(self, nm, value, *args): rows.append((nm,value))
        def close(self): pass
    monkeypatch.setattr(tensorboard, 'SummaryWriter', Writer)
    learn = learner(4, 64)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), NoiseScale(every=2), tensorboard.TensorBoardCallback(
        trace_model=False, log_preds=False)])
    assert [v for nm,v in rows if nm.endswith('noise_scale')][:4]==learn.recorder.noise_scale

# On several processes

def fit_on(rank, learns):
    "A fit of this process for each of `learns`, on its own part of the data; what each has come to"
    res = []
    for kwargs,acc,lr,cbs in learns:
        data = clear(25, kwargs.pop('tokens', False)).tensors
        part = TensorDataset(*(o[:18] if rank==0 else o[18:] for o in data))
        learn,meter = toy(4, data=part, splitter=one_group, **kwargs),NoiseScale(every=1)
        learn.model = DistributedDataParallel(learn.model)
        learn.fit(2, lr, wd=0., cbs=[GradientAccumulation(acc), meter, *cbs])
        res.append((told(meter),learn.recorder.noise_scale,learn.recorder.lrs))
    return res

measured = dict(plain={}, tokens=dict(tokens=True), summed=dict(loss_func=CrossEntropy(reduction='sum')))

def process(rank, at):
    "One of two, which have 18 and 7 samples"
    distributed.init_process_group('gloo', init_method=f'file://{at}/met', rank=rank, world_size=2)
    learns = [(dict(o),100,0.,()) for o in measured.values()]+[({},16,.01,[ScaledLR(base_bs=8)])]
    torch.save(fit_on(rank, learns), at/f'{rank}.pth')
    distributed.destroy_process_group()

@pytest.fixture(scope='module')
def on_two(tmp_path_factory):
    ctx,at = get_context('forkserver'),tmp_path_factory.mktemp('two')
    ctx.set_forkserver_preload(['fastai.vision.all'])
    both = [ctx.Process(target=process, args=(i,at)) for i in range(2)]
    for o in both: o.start()
    for o in both: o.join(300)
    for o in both: o.kill()
    return [torch.load(at/f'{i}.pth', weights_only=False) for i in range(2)]

@pytest.mark.parametrize('i,nm', list(enumerate(measured)))
def test_on_several_processes_the_micro_batches_of_all_are_compared(on_two, i, nm):
    ds = clear(25, nm=='tokens')
    gs = single_gradients(toy(4).model, ds)
    sizes = [int((y>=0).sum()) for o in (ds.tensors[1][:18],ds.tensors[1][18:]) for y in o.split(4)]
    for res in on_two: assert close(res[i][0], by_hand(gs, sizes)) and len(res[i][1])==2

def test_on_several_processes_rates_follow_the_samples_of_all(on_two):
    "Steps of 16 samples, eight of each process, for a rate that is meant for 8"
    for res in on_two: assert close(res[-1][2], [.02]*len(res[-1][2])) and len(res[-1][2])==len(res[-1][1])>=4

# What it says

def test_words_and_picture():
    learn,meter = learner(4, 128),NoiseScale(every=2)
    learn.fit(2, .1, cbs=[GradientAccumulation(16), meter])
    ax = meter.plot()
    scale,size = (list(o.get_ydata()) for o in ax.lines)
    assert scale==learn.recorder.noise_scale[::2] and size==[16]*8 and ax.get_yscale()=='log'
    assert list(ax.lines[0].get_xdata())==list(range(0, 16, 2)) and 'samples' in ax.get_ylabel()
    assert meter.plot(ax=ax) is ax and 'noise scale ≈' in meter.verdict()
    plt.close('all')

def test_noise_that_hides_the_gradient_is_told():
    "Classes are drawn by lot, and the outputs have learned their shares: there is no gradient"
    x,y = torch.randn(12, 5, dtype=torch.float64),torch.tensor([0,1,2,0,1,2,2,1,0,2,1,0])
    net = lambda: nn.Linear(5, 3).double()
    def zero(m):
        for p in m.parameters(): nn.init.zeros_(p)
        return m
    _,meter = measure(n=12, accum_bs=12, data=TensorDataset(x, y), model=lambda: zero(net()), splitter=one_group)
    assert meter.grad_sq<=0 and meter.noise_scale==math.inf and 'hides' in meter.verdict()

def test_one_micro_batch_a_step_is_told_once():
    learn,meter = learner(16, 64),NoiseScale(every=1)
    with pytest.warns(UserWarning, match='one micro-batch') as w:
        learn.fit(2, .1, cbs=[GradientAccumulation(16), meter])
    assert len([o for o in w if 'NoiseScale' in str(o.message)])==1
    assert math.isnan(meter.noise_scale) and 'nothing was measured' in meter.verdict()

def test_gradients_that_come_in_parts_are_told():
    with pytest.warns(UserWarning, match='in parts'):
        learn,meter = measure(cbs=[GradientCache(micro_batch_size=2)])
    assert math.isnan(meter.noise_scale)

# What is refused

off = GradientAccumulation(16)
off.run = False

@pytest.mark.parametrize('cbs', [list,lambda: [FastaiGradientAccumulation(16)],lambda: [off]],
    ids=['none','fastai','off'])
def test_without_accumulation_it_says_what_to_do(cbs):
    learn = learner(4, 16)
    before = weights(learn)
    with pytest.raises(ValueError, match=r'GradientAccumulation\(accum_bs\)'): learn.fit(1, cbs=[NoiseScale(), *cbs()])
    assert torch.equal(before, weights(learn)) and list(learn.metrics)==[]

def test_two_of_them_are_refused():
    learn = learner(4, 16, cbs=[GradientAccumulation(16), NoiseScale()])
    before = weights(learn)
    with pytest.raises(ValueError, match='keep one'): learn.fit(1, cbs=NoiseScale())
    assert torch.equal(before, weights(learn)) and list(learn.metrics)==[]

@pytest.mark.parametrize('every,exc', [(0,ValueError),(-3,ValueError),(2.5,TypeError),('2',TypeError)])
def test_bad_arguments(every, exc):
    with pytest.raises(exc, match=f'every={every!r}'): NoiseScale(every=every)
