"The noise meter: unbiased for micro-batches of any sizes, whatever is done to the gradients, and nobody else notices."
import math, pickle, warnings
from functools import partial
import numpy as np, pytest, torch
from torch import nn
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelTrainException
from fastai.callback.fp16 import AMPMode
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import lr_find
from fastai.callback.training import GradientClip
from fastai.callback.tracker import SaveModelCallback
from fastai.optimizer import Adam, OptimWrapper
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, NoiseScale
from fastaccum.noise.estimator import estimate
from fastaccum.noise.norms import Norms
from fastaccum.testing import CrossEntropy, deviation, toy, toy_data
from common import CpuMixedPrecision, InBackward, Raise, Seen, grads, short_of, weights
from launch import check as passes, launching, script_of

class Scaled(CpuMixedPrecision):
    "The GradScaler without the half precision"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.amp.autocast('cpu', enabled=False)

def standstill(learn, cbs, n_epoch=1): learn.fit(n_epoch, 0., wd=0., cbs=cbs)

def each_gradient(model, ds, loss_func, tokens=False):
    "The gradient of each sample, or of each target that counts"
    res = []
    for x,y in zip(*ds.tensors):
        parts = [(x[None],y[None])]
        if tokens:
            parts = [(x[None],torch.where(torch.arange(len(y))==i, y, -100)[None]) for i in range(len(y)) if y[i]!=-100]
        for xb,yb in parts:
            gs = torch.autograd.grad(loss_func(model(xb), yb), list(model.parameters()))
            res.append(torch.cat([g.flatten() for g in gs]))
    return torch.stack(res)

def exact(gs):
    "tr Σ and |G|², from the gradients of all samples: what `estimate` would say of micro-batches of one"
    trace = gs.var(0).sum().item()
    return trace,gs.mean(0).square().sum().item()-trace/len(gs)

def by_hand(gs, sizes):
    "tr Σ and |G|² of the micro-batches with `sizes`, from the gradients of samples in order"
    means = [o.mean(0) for o in gs.split(sizes)]
    squares = sum(n*g.square().sum().item() for n,g in zip(sizes, means))
    return estimate(squares, gs.mean(0).square().sum().item(), sum(sizes), len(sizes))

def values(meter): return [tuple(o.values.sum(1)) for o in meter.readings]

# The arithmetic

@pytest.mark.parametrize('replace', [False,True])
def test_unbiased_for_random_unequal_partitions(replace):
    "The mean over many draws is the exact value, within four standard errors; the usual formula is far outside"
    rng = np.random.default_rng(0)
    learn = toy(4, n=60)
    gs = each_gradient(learn.model, toy_data(60), CrossEntropy()).numpy()
    trace = gs.var(0, ddof=1-replace).sum()
    grad_sq = np.square(gs.mean(0)).sum()-(0 if replace else trace/len(gs))
    res,usual = [],[]
    for _ in range(4000):
        sizes = rng.integers(1, 9, size=rng.integers(2, 7))
        mine = [gs[o] for o in np.split(rng.choice(60, sizes.sum(), replace=replace), sizes.cumsum()[:-1])]
        means = np.stack([o.mean(0) for o in mine])
        N,k,mean_sq = sizes.sum(),len(sizes),np.square(np.concatenate(mine).mean(0)).sum()
        res.append(estimate((sizes*np.square(means).sum(1)).sum(), mean_sq, N, k))
        b,small = sizes[0],np.square(means).sum(1).mean()
        if N>b: usual.append(((small-mean_sq)/(1/b-1/N), (N*mean_sq-b*small)/(N-b)))
    for o,within in ((res,4), (usual,None)):
        errors = np.abs(np.mean(o, 0)-(trace,grad_sq))/(np.std(o, 0)/len(o)**.5)
        assert (errors<4).all() if within else (errors>8).any(), errors

@pytest.mark.parametrize('k', [2,3,8,64])
def test_equal_sizes_give_mccandlishs_pair(k):
    rng,b = np.random.default_rng(k),5
    gs = rng.normal(size=(k,30))+.3
    small,big,N = np.square(gs).sum(1).mean(),np.square(gs.mean(0)).sum(),k*b
    trace,grad_sq = estimate(b*np.square(gs).sum(), big, N, k)
    assert np.isclose(trace, (small-big)/(1/b-1/N), rtol=1e-12)
    assert np.isclose(grad_sq, (N*big-b*small)/(N-b), rtol=1e-10)

# In a fit: each reading is that of the same micro-batches, from the gradients of their samples

sizes = [4]*4+[4]*4+[3]   # of 35 samples, 16 wanted
groups = [sizes[:4],sizes[4:8],sizes[8:]]

def check(meter, gs, rtol=1e-9, n_micro=sizes, macro=4):
    "Are the readings those of micro-batches of `n_micro` samples, `macro` of them a step, in order?"
    res,at = [],0
    for i in range(0, len(n_micro), macro):
        ns = n_micro[i:i+macro]
        if len(ns)>1: res.append(by_hand(gs[at:at+sum(ns)], ns))
        at += sum(ns)
    assert len(values(meter))==len(res) and np.allclose(values(meter), res, rtol=rtol, atol=0), (values(meter), res)

def ragged(n=38, **kwargs): return toy(4, n=n, **kwargs)   # 9 micro-batches of 4 and one of 2, of 16 samples a step

ns = [4]*9+[2]

@pytest.mark.parametrize('cbs', [list, lambda: [Scaled(init_scale=2.**10)], lambda: [GradientClip(1e-3)],
    lambda: [Scaled(init_scale=2.**4, growth_interval=1), GradientClip(1e-3)]],
    ids=['plain','scaled','clipped','scaled and clipped'])
def test_reads_what_the_samples_say(cbs):
    "With loss scaling and clipping, too; the last macro-batch has micro-batches of 4 and 2"
    learn,meter = ragged(),NoiseScale(every=1)
    gs = each_gradient(learn.model, toy_data(38), CrossEntropy())
    standstill(learn, [GradientAccumulation(16), meter]+cbs())
    check(meter, gs, n_micro=ns, rtol=1e-9 if cbs is list else 1e-5)   # mixed precision makes predictions float32
    assert [o.size for o in meter.readings]==[16,16,6] and meter.unit=='samples'

@pytest.mark.parametrize('k', [2,5,64])
def test_many_micro_batches(k):
    learn,meter = toy(3, n=3*k),NoiseScale()
    gs = each_gradient(learn.model, toy_data(3*k), CrossEntropy())
    standstill(learn, [GradientAccumulation(3*k), meter])
    check(meter, gs, n_micro=[3]*k, macro=k)

def test_a_loss_that_sums():
    "The noise of a sample is the same whether losses are averaged or summed"
    learn,meter = ragged(loss_func=CrossEntropy(reduction='sum')),NoiseScale(every=1)
    gs = each_gradient(learn.model, toy_data(38), CrossEntropy())
    standstill(learn, [GradientAccumulation(16), meter, Scaled(init_scale=2.**4)])
    check(meter, gs, n_micro=ns, rtol=1e-5)

@pytest.mark.parametrize('cbs', [list, lambda: [Scaled(init_scale=2.**10)]], ids=['plain','scaled'])
def test_tokens(cbs):
    "With padding the noise is that of a target that counts"
    ds = toy_data(38, tokens=True)
    ds.tensors[1][8:12] = -100   # a micro-batch with nothing to learn from is none
    learn,meter = ragged(data=ds),NoiseScale(every=1)
    gs = each_gradient(learn.model, ds, CrossEntropy(), tokens=True)
    standstill(learn, [GradientAccumulation(16), meter]+cbs())
    counts = [int((y!=-100).sum()) for y in ds.tensors[1].split(4)]
    res,at = [],0
    for i in (0,4,8):
        own = [o for o in counts[i:i+4] if o]
        res.append(by_hand(gs[at:at+sum(own)], own))
        at += sum(own)
    assert np.allclose(values(meter), res, rtol=1e-9 if cbs is list else 1e-5, atol=0)
    assert meter.unit=='targets' and [o.size for o in meter.readings]==[sum(counts[i:i+4]) for i in (0,4,8)]
    assert [o.samples for o in meter.readings]==[16,16,6]

def test_size_function():
    learn,meter = ragged(),NoiseScale(every=1)
    gs = each_gradient(learn.model, toy_data(38), CrossEntropy())
    standstill(learn, [GradientAccumulation(16, size=lambda l: 2*len(l.y)), meter])
    assert meter.unit=='things' and [o.size for o in meter.readings]==[32,32,12]
    meter2 = NoiseScale(every=1)
    standstill(ragged(), [GradientAccumulation(16), meter2])   # a sample that counts for two has half as noisy things
    a,b = np.array(values(meter)),np.array(values(meter2))
    assert np.allclose(a[:,0], 2*b[:,0]) and np.allclose(a[:,1], b[:,1])

def test_a_parameter_used_twice_and_a_sparse_one():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb,self.lin,self.out = nn.Embedding(9, 5, sparse=True),nn.Linear(5, 5),nn.Linear(5, 3)
        def forward(self, x): return self.out(self.lin(self.lin(self.emb(x).mean(1)).tanh()))
    gen = torch.Generator().manual_seed(0)
    x,y = torch.randint(0, 9, (16,4), generator=gen),torch.randint(0, 3, (16,), generator=gen)
    ds = torch.utils.data.TensorDataset(x, y)
    model = Net().double()
    learn,meter = toy(4, data=ds, model=lambda: model, splitter=lambda m: [list(m.parameters())]),NoiseScale()
    rows = []
    for x,y in zip(*ds.tensors):
        gs = torch.autograd.grad(CrossEntropy()(model(x[None]), y[None]), list(model.parameters()))
        rows.append(torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in gs]))
    class Dense(Callback):   # fastai's SGD cannot step on a sparse gradient
        order = 11
        def before_step(self): self.model.emb.weight.grad = self.model.emb.weight.grad.to_dense()
    standstill(learn, [GradientAccumulation(16), meter, Dense()])
    check(meter, torch.stack(rows), n_micro=[4]*4)

def test_groups_add_up():
    learn,meter = ragged(),NoiseScale(every=1)
    cols = [sum(p.numel() for p in m.parameters()) for m in (learn.model[:2],learn.model[2:])]
    gs = each_gradient(learn.model, toy_data(38), CrossEntropy())
    standstill(learn, [GradientAccumulation(16), meter])
    first = [by_hand(o[:16], [4]*4) for o in gs.split(cols, dim=1)]
    assert np.allclose(meter.readings[0].values.T, first, rtol=1e-9)
    assert len(meter.readings[0].scales)==2

def test_adam():
    "Lengths as Adam sees them, from the state that it has before the step, fastai's and torch's alike"
    def run(opt_func):
        learn = ragged(opt_func=opt_func, splitter=lambda m: [list(m.parameters())])
        meter = NoiseScale(every=1, metric='adam')
        at = Seen('before_step', lambda l: grads(l), order=10.6)
        learn.fit(2, 1e-3, wd=0., cbs=[GradientAccumulation(16), meter, at])
        return meter,at,learn
    meter,at,learn = run(partial(Adam, eps=1e-3))
    assert [o.step for o in meter.readings]==[1,2,3,4,5]   # there is nothing before the first step
    torchs = run(partial(OptimWrapper, opt=torch.optim.AdamW, betas=(.9,.99), eps=1e-3))[0]
    assert np.allclose(values(meter), values(torchs), rtol=1e-6)
    # the second step by hand: v is the square of the first step's gradient
    D = [1/(g.abs()+1e-3) for g in at.values[0]]
    mean_sq = sum((d*g).square().sum().item() for d,g in zip(D, at.values[1]))
    trace,grad_sq = values(meter)[0]
    assert math.isclose(grad_sq+trace/16, mean_sq, rel_tol=1e-9)

# Averages

def test_averages_decay_in_samples_and_say_what_the_readings_say():
    learn,meter = toy(4, n=128),NoiseScale(every=2, half_life=64)
    standstill(learn, [GradientAccumulation(16), meter], n_epoch=2)
    assert [o.step for o in meter.readings]==[0,2,4,6,8,10,12,14]
    sums,weight = 0,0
    for i,o in enumerate(meter.readings):
        keep = .5**((32 if i else 16)/64)
        sums,weight = keep*sums+(1-keep)*o.values,keep*weight+1-keep
        assert np.allclose(o.averages, sums/weight)
    trace,grad_sq = meter.readings[-1].averages.sum(1)
    assert (meter.trace,meter.grad_sq,meter.noise_scale)==(trace,grad_sq,trace/grad_sq)

def test_recorder_has_an_entry_per_step():
    learn,meter = toy(4, n=70),NoiseScale(every=3, metric='adam')
    learn.opt_func = Adam
    learn.fit_one_cycle(2, 1e-2, cbs=[GradientAccumulation(16), meter])
    rec = learn.recorder.noise_scale
    assert len(rec)==len(learn.recorder.losses)==10 and [math.isnan(o) for o in rec[:3]]==[True,False,False]
    assert rec[1]==rec[2]==rec[3] and rec[-1]==meter.noise_scale and [o.step for o in meter.readings]==[1,4,7]

@pytest.mark.parametrize('at', [1,3])
def test_a_step_that_is_cancelled_with_its_batch_has_an_entry(at):
    "...as it has with the Recorder; and the next step, which has its gradient too, is not measured"
    class Cancel(Callback):
        order = 20
        def before_step(self):
            if self.iter//4==at: raise CancelBatchException
    learn,meter = toy(4, n=64),NoiseScale(every=1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16), meter, Cancel()])
    assert len(learn.recorder.noise_scale)==len(learn.recorder.losses)==4
    assert [o.step for o in meter.readings]==[o for o in range(4) if o!=at+1]

def test_a_step_that_is_cancelled_before_it_is_measured():
    "The next one has its gradient, too, and is not measured either"
    class Cancel(Callback):
        order = 8
        def before_step(self):
            if self.iter==7: raise CancelBatchException
    learn,meter = toy(4, n=64),NoiseScale(every=1)
    with pytest.warns(UserWarning, match='the step before was cancelled'):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16), meter, Cancel()])
    assert [o.step for o in meter.readings]==[0,3]

def test_each_fit_begins_anew():
    learn = toy(4, n=64, cbs=[GradientAccumulation(16), NoiseScale(every=2)])
    learn.fit(1, 0.1)
    first = learn.noise_scale.readings
    learn.fit(1, 0.1)
    assert [o.step for o in learn.noise_scale.readings]==[o.step for o in first]==[0,2]
    assert len(learn.recorder.noise_scale)==4

# Nobody notices

@pytest.mark.parametrize('kwargs', [dict(), dict(tokens=True), dict(opt_func=Adam)], ids=str)
@pytest.mark.parametrize('metric', ['sgd','adam'])
def test_weights_are_the_same_to_the_bit(kwargs, metric):
    def run(*cbs):
        learn = toy(4, n=70, **kwargs)
        learn.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(16), GradientClip(.5), Scaled(init_scale=2.**10), *cbs])
        return learn
    a,b = run(),run(NoiseScale(every=1, metric=metric))
    assert torch.equal(weights(a), weights(b)) and a.recorder.losses==b.recorder.losses
    assert deviation(a.opt.state_dict()['state'], b.opt.state_dict()['state'])==0

def hooks(learn): return sum(len(p._backward_hooks or ()) for p in learn.model.parameters())

def test_hooks_are_there_on_measured_steps_only():
    seen = Seen('after_loss', hooks, order=20)
    learn = toy(4, n=64)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(16), NoiseScale(every=2), seen])
    assert seen.values==[0,6,6,6, 0,0,0,0, 0,6,6,6, 0,0,0,0]

@pytest.mark.parametrize('kept', [False,True])
@pytest.mark.parametrize('event', ['after_loss','before_step','after_batch'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,CancelTrainException,RuntimeError])
def test_nothing_is_left_behind(kept, event, exc):
    learn,meter = toy(4, n=64),NoiseScale(every=1)
    raises = Raise(event, exc, order=20, at=2)
    if kept: learn.add_cbs([GradientAccumulation(16), meter])
    try: learn.fit(1, 0.1, cbs=([] if kept else [GradientAccumulation(16), meter])+[raises])
    except (KeyboardInterrupt,RuntimeError): assert raises.raised
    if not kept: assert not hooks(learn) and not learn.metrics
    learn.fit(1, 0.1, cbs=[] if kept else GradientAccumulation(16))
    assert not hooks(learn) and not learn.metrics
    if kept: assert [o.step for o in meter.readings]==[0,1,2,3]
    learn.remove_cb(meter) if kept else None
    learn.fit(1, 0.1)
    assert not learn.metrics and not hooks(learn)

def test_one_wait_per_measured_step(monkeypatch):
    waits = []
    for nm in ('item','tolist','__bool__','__float__','__int__'):
        stock = getattr(torch.Tensor, nm)
        def f(self, *args, nm=nm, stock=stock):
            waits.append(nm)
            return stock(self, *args)
        monkeypatch.setattr(torch.Tensor, nm, f)
    def run(*cbs):
        learn = toy(4, n=64, tokens=True)
        waits.clear()
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16), *cbs])
        return list(waits)
    a,b = run(),run(NoiseScale(every=2))
    for o in a: b.remove(o)
    assert b==['tolist']*2

# What cannot be measured

def test_a_skipped_step_is_left_out():
    "The gradient of the fourth step overflows: the fifth, a short one, is measured in its place; every entry stands"
    class Overflow(Callback):
        order,run_valid = 9,False
        def before_backward(self):
            if self.iter==13: self.learn.loss_grad = self.loss_grad*float('inf')
    learn,meter = toy(4, n=70),NoiseScale(every=1)
    gs = each_gradient(learn.model, toy_data(70), CrossEntropy())
    standstill(learn, [GradientAccumulation(16), meter, Scaled(init_scale=2.**10), Overflow()])
    assert [o.step for o in meter.readings]==[0,1,2,4] and len(learn.recorder.noise_scale)==5
    want = [by_hand(gs[i:i+16], [4]*4) for i in (0,16,32)]+[by_hand(gs[64:], [4,2])]
    assert np.allclose(values(meter), want, rtol=1e-5)

def test_one_micro_batch_a_step_is_told_once():
    learn,meter = toy(16, n=64),NoiseScale(every=1)
    with pytest.warns(UserWarning, match='one micro-batch') as w:
        learn.fit(2, 0.1, cbs=[GradientAccumulation(16), meter])
    assert len([o for o in w if 'NoiseScale' in str(o.message)])==1
    assert math.isnan(meter.noise_scale) and 'nothing was measured' in meter.verdict()

def test_a_batch_size_that_grows_is_measured_from_where_it_can_be():
    learn,meter = toy(8, n=64),NoiseScale(every=1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(2, 0.1, cbs=[GradientAccumulationSchedule(8, 32, start=1, finish=1), meter])
    assert [(o.step,o.samples) for o in meter.readings]==[(8,32),(9,32)]

@pytest.mark.parametrize('left_out', ['loss','backward','early backward','last backward','batch'])
def test_micro_batches_that_are_left_out(left_out):
    "One that a callback cancels is not there; one whose loss needs no gradient makes the step one that is not measured"
    class Out(Callback):
        order,run_valid = 5 if left_out=='early backward' else 20,False   # before anybody has counted it
        def before_batch(self):
            if self.iter==1 and left_out=='batch': raise CancelBatchException
        def before_backward(self):
            if self.iter==1 and left_out in ('backward','early backward'): raise CancelBackwardException
            if self.iter==7 and left_out=='last backward': raise CancelBackwardException
    class Detach(Callback):
        order,run_valid = 5,False
        def before_backward(self):
            if self.iter==1 and left_out=='loss': self.learn.loss_grad = self.loss_grad.detach()
    learn,meter = toy(4, n=32),NoiseScale(every=1)
    gs = each_gradient(learn.model, toy_data(32), CrossEntropy())
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        standstill(learn, [GradientAccumulation(16), meter, Out(), Detach()])
    gs = gs[:28] if left_out=='last backward' else torch.cat([gs[:4],gs[8:]])
    if left_out=='loss':
        assert any('needs no gradient' in str(o.message) for o in w)
        assert [o.step for o in meter.readings]==[1]
    else: check(meter, gs, n_micro=[4]*7)

def test_a_gradient_that_is_changed_on_the_way_is_told():
    class Longer(Callback):
        order = 10
        def before_step(self):
            for p in self.model.parameters(): p.grad.mul_(30)
    with pytest.warns(UserWarning, match='A callback changes it'):
        toy(4, n=32).fit(1, 0.1, cbs=[GradientAccumulation(16), NoiseScale(), Longer()])

def test_gradients_in_parts_are_told():
    "Reentrant checkpoints through a layer that is used twice"
    from torch.utils.checkpoint import checkpoint
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b,self.c = nn.Linear(5, 6),nn.Linear(6, 6),nn.Linear(6, 3)
        def forward(self, x):
            x = self.a(x)
            for _ in range(2): x = checkpoint(self.b, x, use_reentrant=True)
            return self.c(x)
    learn = toy(4, n=32, model=lambda: Net().double(), splitter=lambda m: [list(m.parameters())])
    meter = NoiseScale()
    with pytest.warns(UserWarning, match='came in parts'): learn.fit(1, 0.1, cbs=[GradientAccumulation(16), meter])
    assert not meter.readings

def test_no_gradient_is_told():
    "As with a copy of the parameters that is trained in their place"
    loss = lambda pred,y: pred.sum()*0
    with pytest.warns(UserWarning, match='no gradient came in'):
        toy(4, n=32, loss_func=loss).fit(1, 0.1, cbs=[GradientAccumulation(16), NoiseScale()])

@pytest.mark.parametrize('mode', list(AMPMode))
def test_half_precision(mode):
    "Real half precision, with a scale where it is float16: as in single precision, to the rounding of the gradients"
    def readings(*cbs):
        learn,meter = toy(4, n=64, model=lambda: nn.Sequential(nn.Linear(5,16), nn.ReLU(), nn.Linear(16,3)),
            splitter=lambda m: [list(m.parameters())]),NoiseScale(every=1)
        ds = learn.dls.train_ds
        ds.tensors = ds.tensors[0].float(),ds.tensors[1]
        standstill(learn, [GradientAccumulation(16), meter, *cbs])
        return np.array(values(meter))
    a,b = readings(),readings(CpuMixedPrecision(amp_mode=mode))
    eps = torch.finfo(dict(fp16=torch.float16, bf16=torch.bfloat16)[mode.value]).eps
    assert len(a)==len(b)==4 and np.abs(a-b).max()<8*eps*a.max() and np.abs(a-b).max()>0

def test_bfloat16_parameters():
    def readings(dtype):
        learn,meter = toy(4, n=64, model=lambda: nn.Sequential(nn.Linear(5,16), nn.ReLU(), nn.Linear(16,3)).to(dtype),
            splitter=lambda m: [list(m.parameters())]),NoiseScale(every=1)
        ds = learn.dls.train_ds
        ds.tensors = ds.tensors[0].to(dtype),ds.tensors[1]
        standstill(learn, [GradientAccumulation(16), meter])
        return np.array(values(meter))
    a,b = readings(torch.float32),readings(torch.bfloat16)
    assert len(b)==4 and np.abs(a-b).max()<.1*a.max()

def test_other_backward_passes_are_not_heard():
    "A gradient penalty computes gradients of the parameters in the middle of everything"
    class Penalty(Callback):
        order = 20
        def after_pred(self):
            if self.training: torch.autograd.grad(self.pred.sum(), list(self.model.parameters()), retain_graph=True)
    learn,meter = ragged(),NoiseScale(every=1)
    gs = each_gradient(learn.model, toy_data(38), CrossEntropy())
    standstill(learn, [GradientAccumulation(16), meter, Penalty()])
    check(meter, gs, n_micro=ns)

def test_without_accumulation_it_says_what_to_do():
    from fastai.callback.training import GradientAccumulation as Fastais
    for cbs in ([], [Fastais(16)]):
        learn = toy(4)
        before = weights(learn)
        with pytest.raises(ValueError, match=r'GradientAccumulation\(accum_bs\)'):
            learn.fit(1, cbs=[NoiseScale(), *cbs])
        assert torch.equal(before, weights(learn)) and not learn.metrics

def test_an_accumulation_that_is_switched_off_is_none():
    acc = GradientAccumulation(16)
    acc.run = False
    with pytest.raises(ValueError, match=r'GradientAccumulation\(accum_bs\)'):
        toy(4).fit(1, cbs=[NoiseScale(), acc])

def test_an_accumulation_that_is_switched_off_in_the_middle_of_a_step():
    "What it had accumulated is no step that can be measured"
    class Off(Callback):
        run_valid = False
        def before_batch(self):
            if self.iter==6: self.gradient_accumulation.run = False
    learn,meter = toy(4, n=64),NoiseScale(every=1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16), meter, Off()])
    assert [o.step for o in meter.readings]==[0]

def test_a_meter_that_comes_later():
    meter = NoiseScale(every=1)
    class Add(Callback):
        def after_epoch(self):
            if not self.epoch: self.learn.add_cb(meter)
    learn = toy(4, n=32)
    learn.fit(2, 0.1, cbs=[GradientAccumulation(16), Add()])
    assert [o.step for o in meter.readings]==[0,1] and not hooks(learn)

@pytest.mark.parametrize('kwargs,exc', [(dict(every=0),ValueError), (dict(every=2.5),TypeError),
    (dict(half_life=0),ValueError), (dict(metric='lamb'),ValueError)], ids=str)
def test_bad_arguments(kwargs, exc):
    with pytest.raises(exc): NoiseScale(**kwargs)

# Memory that runs out, and other company

def test_a_failed_attempt_is_forgotten():
    "Memory runs out in the backward pass of a micro-batch: what counts are its halves"
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = nn.Linear(5, 6),nn.Linear(6, 3)
        def forward(self, x): return self.b(InBackward.apply(self.a(x), short_of(2)))
    model = Net().double()
    learn,meter = toy(4, n=16, model=lambda: model, splitter=lambda m: [list(m.parameters())]),NoiseScale()
    gs = [torch.autograd.grad(CrossEntropy()(model(x[None]), y[None]), list(model.parameters()))
        for x,y in zip(*toy_data(16).tensors)]
    with pytest.warns(UserWarning, match='memory ran out'):
        standstill(learn, [GradientAccumulation(16, micro_batch_size='auto'), meter])
    check(meter, torch.stack([torch.cat([g.flatten() for g in o]) for o in gs]), n_micro=[2]*8, macro=8)

def test_frozen_groups_are_nothing():
    learn,meter = toy(4, n=32, cbs=GradientAccumulation(16)),NoiseScale(every=1)
    learn.freeze()
    learn.fit(1, 0.1, cbs=meter)
    o = meter.readings[0]
    assert o.values.shape==(2,2) and not o.values[:,0].any() and math.isnan(o.scales[0]) and o.scale==o.scales[1]

def test_lr_find_and_logs(tmp_path):
    learn = toy(4, n=64, cbs=[GradientAccumulation(16), NoiseScale(every=1)])
    learn.path = tmp_path
    learn.lr_find(num_it=6, show_plot=False)
    assert not learn.metrics
    learn.fit(2, 0.1, cbs=CSVLogger())
    rows = [o.split(',') for o in (tmp_path/'history.csv').read_text().splitlines()]
    at = rows[0].index('noise_scale')
    assert [float(o[at]) for o in rows[1:]]==[learn.recorder.noise_scale[i] for i in (3,7)]
    learn.fit(1, 0.1, cbs=SaveModelCallback())
    assert len(learn.validate())==1

def test_a_learner_with_the_meter_can_be_exported():
    learn = toy(4, n=64, splitter=lambda m: [list(m.parameters())], cbs=[GradientAccumulation(16), NoiseScale(every=1)])
    learn.fit(1, 0.1)
    meter = pickle.loads(pickle.dumps(learn.noise_scale.meter.readings))
    assert len(meter)==4

def test_hooks_are_not_pickled():
    "Of others, who have some on the same parameters, least of all"
    p = nn.Parameter(torch.ones(2))
    p.register_hook(lambda g: None)
    norms = Norms([[p]], lambda: True).enter()
    norms.live = None
    assert not pickle.loads(pickle.dumps(norms)).handles and len(p._backward_hooks)==2

def test_plot_and_verdict():
    import matplotlib.pyplot as plt
    learn,meter = toy(4, n=128),NoiseScale(every=2)
    learn.fit(2, 0.1, cbs=[GradientAccumulation(16), meter])
    ax = meter.plot(groups=True)
    assert ax.get_yscale()=='log' and len(ax.lines)==4 and list(ax.lines[-1].get_ydata())==[16]*8
    assert list(ax.lines[-2].get_ydata())==[o.scale for o in meter.readings]
    assert 'steps of 16' in meter.verdict()
    plt.close('all')

def test_loggers_have_a_column(tmp_path):
    from fastaccum.core.listeners import listeners
    from fastaccum.loggers import LoggerListener
    class Rows(Callback):
        order,run_valid = 51,False
        def before_fit(self): self.rows = []
        def after_batch(self): self.rows.append({})
    class RowsListener(LoggerListener):
        def add(self, row): self.cb.rows[-1].update(row)
    listeners[Rows] = RowsListener
    try:
        learn,rows = toy(4, n=64),Rows()
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16), NoiseScale(every=2), rows])
        assert [o['noise_scale'] for o in rows.rows]==learn.recorder.noise_scale and len(rows.rows)==4
    finally: del listeners[Rows]

# Several processes

script,cases = script_of('noise_processes.py')
launches = launching(script, {2:cases, 3:cases})

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.parametrize('case', cases)
def test_on_several_processes(launches, n, case): passes(launches, n, case)
