"NoiseScale measures the noise of gradients without bias, from micro-batches of any sizes, and changes nothing else."
import math
from functools import partial
import numpy as np, pytest, torch
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import TensorDataset
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelStepException,
    CancelTrainException)
from fastai.callback.schedule import lr_find
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation, GradientClip
from fastai.optimizer import Adam, OptimWrapper
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientCache, NoiseScale
from fastaccum.testing import CrossEntropy, deviation, toy, toy_data
from common import CpuMixedPrecision, InBackward, Raise, Seen, short_of, weights

class Scaled(CpuMixedPrecision):
    "The scale of half precision, in double precision"
    def __init__(self): super().__init__(init_scale=2.**10)
    def after_pred(self): pass

def clear(n=18, tokens=False):
    "Data with a signal: most of it is of one class"
    x,y = toy_data(n, tokens).tensors
    return TensorDataset(x, torch.where(y<0, y, (x[...,0]<-1).long()))

def one_group(m): return [list(m.parameters())]
def learner(bs, n, **kwargs): return toy(bs, **dict(data=clear(n))|kwargs)
def told(meter): return meter.trace,meter.grad_sq
def close(a, b, rtol=1e-9): return np.allclose(a, b, rtol=rtol, atol=0)

def single_gradients(learn):
    "The gradient of each sample, or of each target that is not ignored"
    res = []
    for x,y in zip(*learn.dls.train.dataset.tensors):
        ys = [torch.where(torch.arange(len(y))==i, y, -100) for i in range(len(y)) if y[i]!=-100] if y.ndim else [y]
        for o in ys:
            gs = torch.autograd.grad(CrossEntropy()(learn.model(x[None]), o[None]), list(learn.model.parameters()))
            res.append(torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in gs]))
    return torch.stack(res)

def by_hand(gs, sizes):
    "tr Σ and |G|² of micro-batches with these sizes, by the analysis of variance for groups of unequal size"
    mean = gs.mean(0)
    spread = sum(n*(g.mean(0)-mean).square().sum() for n,g in zip(sizes, gs.split(sizes)))
    trace = spread/(len(sizes)-1)
    return trace.item(),(mean.square().sum()-trace/sum(sizes)).item()

def measure(n_epoch=1, *, n=18, accum_bs=100, bs=4, cbs=(), acc={}, **kwargs):
    "At a standstill; by default one step of four micro-batches with 4 samples and one with 2"
    learn,meter = learner(bs, n, **kwargs),NoiseScale(every=1)
    learn.fit(n_epoch, 0., wd=0., cbs=[GradientAccumulation(accum_bs, **acc), meter, *cbs])
    return learn,meter

# What is measured

class Penalty(Callback):
    "Back-propagates in the middle of everything"
    def after_pred(self):
        if self.training: torch.autograd.grad(self.pred.sum(), list(self.model.parameters()), retain_graph=True)
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
class Short(nn.Module):
    "Memory runs out with more than two samples"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 6),nn.Linear(6, 3)
    def forward(self, x): return self.b(InBackward.apply(self.a(x), short_of(2)))

summed = dict(loss_func=CrossEntropy(reduction='sum'))
indices = TensorDataset(torch.arange(72).view(18, 4)%9, clear().tensors[1])
padded = clear(tokens=True)
padded.tensors[1][8:12] = -100   # a micro-batch with nothing to learn from is none
targets = [n for n in ((o!=-100).sum().item() for o in padded.tensors[1].split(4)) if n]
ragged = [4]*4+[2]
cases = dict(plain=(dict, ragged), summed=(lambda: summed, ragged), scaled=(lambda: dict(cbs=[Scaled()]), ragged),
    clipped=(lambda: dict(cbs=[GradientClip(1e-3)]), ragged), adam=(lambda: dict(opt_func=Adam), ragged),
    all=(lambda: summed|dict(cbs=[Scaled(),GradientClip(1e-3)]), ragged),
    torchs=(lambda: dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), ragged),
    other_backward_passes=(lambda: dict(cbs=[Penalty()]), ragged), two=(lambda: dict(bs=3, n=6), [3,3]),
    ones=(lambda: dict(bs=1, n=9), [1]*9), many=(lambda: dict(bs=3, n=100), [3]*33+[1]),
    sparse=(lambda: dict(data=indices, model=lambda: Sparse().double(), splitter=one_group, cbs=[Dense()]), ragged),
    tokens=(lambda: dict(data=padded), targets), tokens_scaled=(lambda: dict(data=padded, cbs=[Scaled()]), targets),
    out_of_memory=(lambda: dict(model=lambda: Short().double(), splitter=one_group, acc=dict(micro_batch_size='auto')),
        [2]*9),
    batch_left_out=(lambda: dict(cbs=[Raise('before_batch', CancelBatchException, 20, at=1)]), [4,4,4,2]),
    backward_left_out=(lambda: dict(cbs=[Raise('before_backward', CancelBackwardException, 20, at=1)]), [4,4,4,2]),
    last_left_out=(lambda: dict(cbs=[Raise('before_backward', CancelBackwardException, 20, at=4)]), [4]*4))

@pytest.mark.filterwarnings('ignore:memory ran out')
@pytest.mark.parametrize('nm', cases)
def test_what_is_measured_is_what_the_gradients_of_single_samples_say(nm):
    make,sizes = cases[nm]
    learn,meter = measure(**make())
    gs = single_gradients(learn)
    if 'left' in nm: gs = gs[:16] if nm=='last_left_out' else torch.cat([gs[:4],gs[8:]])
    want = by_hand(gs, sizes)
    assert close(told(meter), want, 1e-5 if nm=='tokens_scaled' else 1e-9)   # shares of tokens are in single precision
    assert close(meter.noise_scale, want[0]/want[1], 1e-5) and learn.recorder.noise_scale==[meter.noise_scale]
    unit = 'targets' if 'tokens' in nm else 'samples'
    used = 1/(1+sum(sizes)/meter.noise_scale)   # McCandlish et al., 2018
    for o in (f'steps of {sum(sizes)} ',f' {unit}:',f' {used:.0%} '): assert o in meter.verdict()

def test_it_is_unbiased():
    "A hundred draws of ragged micro-batches; the variance and the mean over all samples are known"
    learn,meter = measure(100, n=38, shuffle=True)
    gs = single_gradients(learn)
    assert close(told(meter), by_hand(gs, [1]*38), .05)

def test_own_sizes():
    "A sample that counts for two holds two things, each with twice the noise"
    (_,one),(_,two) = measure(),measure(acc=dict(size=lambda l: 2*len(l.y)))
    assert close(told(two), (2*one.trace,one.grad_sq)) and 'steps of 36' in two.verdict()

def test_frozen_parameters_have_no_noise():
    learn,meter = toy(4, data=clear(), cbs=GradientAccumulation(18)),NoiseScale(every=1)
    learn.freeze()
    learn.fit(1, 0., cbs=meter)
    learn.unfreeze()
    gs = single_gradients(learn)[:,sum(p.numel() for p in learn.model[:2].parameters()):]
    assert close(told(meter), by_hand(gs, ragged))

@pytest.mark.parametrize('kind', ['fp16','bf16','parameters'])
def test_half_precision_tells_the_same_but_for_rounding(kind):
    "A scale that was forgotten would be a factor of thousands"
    def run(dtype, *cbs):
        def net(): return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
        x,y = clear().tensors
        return told(measure(data=TensorDataset(x.to(dtype), y), model=net, splitter=one_group, cbs=cbs)[1])
    half = run(torch.bfloat16) if kind=='parameters' else run(torch.float32, CpuMixedPrecision(amp_mode=kind))
    assert close(half, run(torch.float64), .1)

# Over the steps of a fit

def test_older_measurements_count_less():
    "Half as much after 20 of them"
    learn,meter = learner(4, 70),NoiseScale(every=1)
    seen = Seen('after_step', lambda l: told(meter), order=100)
    learn.fit(1, 0., wd=0., cbs=[GradientAccumulation(16), meter, seen])
    sums,weight = 0,0
    for part,now in zip(single_gradients(learn).split(16), seen.values, strict=True):
        keep = .5**(len(part)/16/20)
        sums,weight = keep*sums+(1-keep)*np.array(by_hand(part, [len(o) for o in part.split(4)])),keep*weight+1-keep
        assert close(now, sums/weight)

def test_an_entry_a_step():
    "...of which every third is measured; each fit begins anew, and the picture shows what was measured"
    learn = learner(4, 70, cbs=[GradientAccumulation(16), NoiseScale(every=3)])
    for _ in range(2):
        learn.fit_one_cycle(2, 1e-2)
        rec = learn.recorder.noise_scale
        assert len(rec)==len(learn.recorder.losses)==10 and rec[-1]==learn.noise_scale.noise_scale
        assert [a==b for a,b in zip(rec, rec[1:])]==[True,True,False]*3
        ax = learn.noise_scale.plot()
        assert [list(o.get_ydata()) for o in ax.lines]==[rec[::3],[16,16,16,6]] and ax.get_yscale()=='log'
        assert list(ax.lines[0].get_xdata())==[0,3,6,9] and learn.noise_scale.plot(ax=ax) is ax
        plt.close('all')

@pytest.mark.parametrize('event,order', [('before_backward',9),('before_step',9),('before_step',20)])
def test_a_step_that_is_not_taken_has_an_entry(event, order):
    "If it overflows, it is not measured; the next one is"
    learn,cb,overflows = learner(4, 64),Callback(),event=='before_backward'
    def third():
        if len(learn.recorder.lrs)!=2: return
        if not overflows: raise CancelStepException
        learn.loss_grad = learn.loss_grad*float('inf')
    cb.order = order
    setattr(cb, event, third)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), NoiseScale(every=1), cb, *([Scaled()] if overflows else [])])
    rec = learn.recorder.noise_scale
    assert len(rec)==len(learn.recorder.losses)==4 and np.isfinite(rec).all()
    assert rec[0]!=rec[1] and rec[2]!=rec[3] and (rec[1]==rec[2] or not overflows)

def test_a_batch_that_grows_is_measured_from_where_it_can_be():
    learn,meter = learner(8, 64),NoiseScale(every=1)
    with pytest.warns(UserWarning, match='one micro-batch') as w:
        learn.fit(2, .1, cbs=[GradientAccumulationSchedule(8, 32, start=1, finish=1), meter])
    assert np.isnan(learn.recorder.noise_scale).tolist()==[True]*8+[False]*2 and len(w)==1

# Nothing else changes

@pytest.mark.parametrize('kwargs', [{},dict(data=clear(70, True)),dict(opt_func=Adam)], ids=['sgd','tokens','adam'])
def test_training_is_the_same_to_the_bit(kwargs):
    def run(*cbs):
        learn = learner(4, 70, **kwargs)
        learn.fit_one_cycle(2, .1, cbs=[GradientAccumulation(16), GradientClip(.5), Scaled(), *cbs])
        return learn
    a,b = run(),run(NoiseScale(every=1))
    assert torch.equal(weights(a), weights(b)) and a.recorder.losses==b.recorder.losses
    assert deviation(a.opt.state_dict()['state'], b.opt.state_dict()['state'])==0 and list(b.metrics)==[]

def left(learn): return sum(len(p._backward_hooks or ()) for p in learn.model.parameters())+len(learn.metrics)

@pytest.mark.parametrize('on_learner', [False,True])
@pytest.mark.parametrize('event', ['after_loss','before_step','after_step'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,CancelTrainException])
def test_nothing_is_left_after_an_interrupt(on_learner, event, exc):
    "And the next fit measures what it would have; validation and lr_find go on, and are not measured"
    learn,own = learner(4, 64),[GradientAccumulation(16),NoiseScale(every=1)]
    cbs = [Raise(event, exc, 20, at=2)]
    if on_learner: learn.add_cbs(own)
    try: learn.fit(1, .1, cbs=cbs if on_learner else own+cbs)
    except KeyboardInterrupt: pass
    assert cbs[0].raised and (on_learner or not left(learn))
    learn.fit(1, 0., wd=0., cbs=[] if on_learner else own)
    new,rec = learner(4, 64),list(learn.recorder.noise_scale)
    new.model.load_state_dict(learn.model.state_dict())
    new.fit(1, 0., wd=0., cbs=[GradientAccumulation(16), NoiseScale(every=1)])
    assert not left(learn) and len(rec)==4 and close(rec, new.recorder.noise_scale)
    learn.validate()
    assert learn.recorder.noise_scale==rec
    learn.lr_find(num_it=5, show_plot=False)
    assert not left(learn)

def test_the_host_waits_once_a_measured_step(monkeypatch):
    waits = []
    for nm in ('item','tolist','__bool__','__float__','__int__'):
        f = getattr(torch.Tensor, nm)
        monkeypatch.setattr(torch.Tensor, nm, lambda *args, f=f: (waits.append(1), f(*args))[1])
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
        def add_scalar(self, nm, value, *args): rows.append((nm,value))
        def close(self): pass
    monkeypatch.setattr(tensorboard, 'SummaryWriter', lambda *args, **kwargs: Writer())
    learn,board = learner(4, 64),tensorboard.TensorBoardCallback(trace_model=False, log_preds=False)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), NoiseScale(every=2), board])
    assert [v for nm,v in rows if nm.endswith('noise_scale')][:4]==learn.recorder.noise_scale

# What it says, and what it refuses

def test_noise_that_hides_the_gradient_is_told():
    "There is none: for each sample there is its opposite, and the outputs have learned the shares of the classes"
    def net():
        m = nn.Linear(5, 3).double()
        for p in m.parameters(): nn.init.zeros_(p)
        return m
    x,y = toy_data(6).tensors[0],torch.arange(6)%3
    _,meter = measure(data=TensorDataset(torch.cat([x,-x]), torch.cat([y,y])), model=net, splitter=one_group)
    assert meter.grad_sq<0 and meter.noise_scale==math.inf and 'hides' in meter.verdict()

@pytest.mark.parametrize('kwargs,match', [(dict(accum_bs=4),'one micro-batch'),
    (dict(cbs=[GradientCache(micro_batch_size=2)]),'in parts')], ids=['one','cache'])
def test_what_cannot_be_measured_is_told_once(kwargs, match):
    with pytest.warns(UserWarning, match=match) as w: _,meter = measure(2, **kwargs)
    assert len([o for o in w if 'NoiseScale' in str(o.message)])==1
    assert math.isnan(meter.noise_scale) and 'nothing was measured' in meter.verdict()

off = GradientAccumulation(16)
off.run = False

@pytest.mark.parametrize('cbs,match', [([off],r'GradientAccumulation\('), ([GradientAccumulation(16),NoiseScale()],
    'keep one'), ([FastaiGradientAccumulation(16)],r'GradientAccumulation\(')], ids=['off','two','fastais'])
def test_what_cannot_work_is_refused_before_a_weight_moves(cbs, match):
    learn = learner(4, 16)
    before = weights(learn)
    with pytest.raises(ValueError, match=match): learn.fit(1, cbs=[NoiseScale(), *cbs])
    assert torch.equal(before, weights(learn)) and not left(learn)
