"""In half precision, a run on micro-batches is the full-batch run.

The GradScaler scales all losses of a step by the same number, an overflow skips only its own step,
clipping acts once on the mean gradient, and gradients are added up in single precision.
"""
import pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.vision.all import AMPMode, Adam, Callback, GradientClip, Module, OptimWrapper, SGD, noop
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import assert_same_run, deviation, toy, toy_data, both_runs
from common import (CallAt, CheckInBackward, CpuLossScaling, CpuMixedPrecision, RecordAt, grads, overflow_on_sample,
    raise_oom_above, weights, with_float32_inputs)
from small_learners import all_params

# Mixed precision

@pytest.mark.parametrize('clip', [1e9,0.05])
@pytest.mark.parametrize('kwargs', [dict(), dict(tokens=True, n=67, shuffle=True), dict(accum_bs=10, opt_func=Adam),
    dict(acc=dict(drop_last=True)), dict(acc=dict(micro_batch_size=2))])
def test_a_scaled_run_is_the_full_batch_run(kwargs, clip):
    "Clipping acts on the unscaled mean gradient"
    def cbs(): return [CpuLossScaling(init_scale=2.**10, growth_interval=3),GradientClip(clip)]
    assert_same_run(*both_runs(cbs=cbs, **kwargs))

@pytest.mark.parametrize('i', [0,21,69])
def test_an_overflow_skips_its_own_step_only(i):
    """The loss of the micro-batch with sample `i` overflows, in step `i//16`

    The scale is halved once, after this step.
    """
    scales,overflow = [],partial(overflow_on_sample, i)
    def cbs():
        scales.append(RecordAt('before_step', lambda l: l.scaler.get_scale(), order=9))
        # `MixedPrecision`, whose order is 10, scales the loss after this callback
        overflows = CallAt('before_backward', overflow, order=9)
        return [CpuLossScaling(init_scale=2.**10),scales[-1],overflows]
    a,b = both_runs(cbs=cbs, n=70)
    assert_same_run(a, b)
    assert scales[0].values==scales[1].values==[2.**10]*(i//16+1)+[2.**9]*(9-i//16)

@pytest.mark.parametrize('mode', list(AMPMode))
def test_the_run_in_mixed_precision_differs_by_rounding_only(mode):
    "The full-batch run in single precision shows how large rounding is. Recorded losses are not scaled"
    runs = partial(both_runs, data=with_float32_inputs(toy_data(70)), splitter=all_params,
        model=lambda: nn.Sequential(nn.Linear(5,16), nn.Tanh(), nn.Linear(16,3)))
    seen = RecordAt('after_pred', lambda l: l.model[0](l.x).dtype)
    a,b = runs(cbs=lambda: [CpuMixedPrecision(amp_mode=mode), seen])
    single,_ = runs()
    assert set(seen.values)=={dict(fp16=torch.float16, bf16=torch.bfloat16)[mode.value]}
    for f in (weights, lambda l: l.recorder.losses, lambda l: l.recorder.values):
        assert deviation(f(a), f(b))<=4*deviation(f(a), f(single))<0.1

# Parameters in half precision

class Model(Module):
    """A model with parameters of `dtype`

    With `mixed=True`, its normalization layer is in single precision.
    """
    def __init__(self, dtype=torch.bfloat16, mixed=False):
        self.a,self.norm,self.b = nn.Linear(4, 8),nn.LayerNorm(8),nn.Linear(8, 3)
        self.to(dtype)
        self.dtype,self.check = dtype,noop
        if mixed: self.norm.float()
    def forward(self, x):
        x = self.a(x.to(self.dtype))
        x = self.norm(x.to(self.norm.weight.dtype)).to(self.b.weight.dtype).tanh()
        return CheckInBackward.apply(self.b(x).float(), self.check)

def learner(n, bs=2, cbs=None, loss_func=F.cross_entropy, opt_func=SGD, ignored=False, **kwargs):
    """Return a Learner with a `Model` on `n` samples

    With `ignored=True`, the loss ignores about 30% of them.
    """
    torch.manual_seed(0)
    y = torch.randint(0, 3, (n,))
    if ignored: y[torch.rand(n)<0.3] = -100
    ds = TensorDataset(torch.randn(n, 4), y)
    return toy(bs, data=ds, model=lambda: Model(**kwargs), splitter=all_params, loss_func=loss_func, opt_func=opt_func,
        cbs=cbs)

def exact_gradients(learn):
    "Return the gradients of the loss of all samples, computed in double precision"
    model = Model(torch.float64)
    model.load_state_dict(learn.model.state_dict())
    x,y = learn.dls.train.dataset.tensors
    learn.loss_func(model(x.double()), y).backward()
    return [p.grad for p in model.parameters()]

def sum_gradients(learn, bs, dtype=None):
    """Add up gradients in a plain loop over micro-batches

    Sums have `dtype`, by default the type of the parameters.
    """
    ps,(x,y) = list(learn.model.parameters()),learn.dls.train.dataset.tensors
    sums = [torch.zeros(p.shape, dtype=dtype or p.dtype) for p in ps]
    for xs,ys in zip(x.split(bs), y.split(bs)):
        weight = 1 if getattr(learn.loss_func, 'reduction', '')=='sum' else ((ys>=0).sum()/(y>=0).sum()).item()
        if weight: gs = torch.autograd.grad(learn.loss_func(learn.model(xs), ys), ps)
        if weight: sums = [o+g.to(o.dtype)*weight for o,g in zip(sums, gs)]
    return [o.to(p.dtype) for o,p in zip(sums, ps)]

def error(gs, exact):
    "Return the largest error of a gradient, relative to the norm of the exact gradient"
    return max(((g.double()-r).norm()/r.norm()).item() for g,r in zip(gs, exact))

kinds = dict(bf16=dict(), fp16=dict(dtype=torch.float16), mixed=dict(mixed=True), ragged=dict(bs=3),
    ignored=dict(ignored=True, loss_func=nn.CrossEntropyLoss()),
    sum=dict(loss_func=nn.CrossEntropyLoss(reduction='sum')), split=dict(bs=8, acc=dict(micro_batch_size=2)),
    auto=dict(bs=8, acc=dict(micro_batch_size='auto')), cached=dict(bs=128, cached=True))

@pytest.mark.filterwarnings('ignore:.*memory ran out')
@pytest.mark.parametrize('kind', kinds)
def test_gradients_add_up_in_single_precision(kind):
    "The error is that of a loop that adds in single precision, and smaller than in half precision"
    kwargs,at = dict(bs=2)|kinds[kind],RecordAt('before_step', grads, order=8)
    acc,cached = kwargs.pop('acc', {}),kwargs.pop('cached', False)
    learn = learner(512, cbs=[at], **kwargs)
    exact,bs = exact_gradients(learn),min(kwargs['bs'], 3) if kind=='ragged' else 2
    single,half = (error(sum_gradients(learn, bs, o), exact) for o in (torch.float32,None))
    if kind=='auto': learn.model.check = raise_oom_above(2)
    learn.fit(1, 0., cbs=[GradientAccumulation(512, **acc), *([GradientCache(micro_batch_size=2)] if cached else [])])
    assert len(at.values)==1 and error(at.values[0], exact)<2*single<half
    assert all(g.dtype==p.dtype for g,p in zip(at.values[0], learn.model.parameters()))

@pytest.mark.parametrize('opt_func', [SGD,partial(OptimWrapper, opt=torch.optim.AdamW)])
def test_a_frozen_parameter_has_the_gradient_of_the_full_batch_run(opt_func):
    "After a step, torch's optimizers leave a gradient of None, and fastai's leave zeros"
    def run(bs, *cbs):
        learn = learner(32, bs, opt_func=opt_func)
        learn.create_opt()
        learn.model.norm.requires_grad_(False)
        learn.fit(2, 0.1, wd=0.1, cbs=cbs)
        return [g is None for g in grads(learn)],learn.model.norm.weight
    (a,big),(b,small) = run(8),run(2, GradientAccumulation(8))
    assert a==b and big.equal(small)

class LatePenalty(Callback):
    "Adds a penalty on the weights to the loss after `MixedPrecision` has scaled it, in place or not"
    order,run_valid = 20,False
    def __init__(self, in_place): self.in_place = in_place
    def before_backward(self):
        penalty = 0.1*sum(p.square().sum() for p in self.model.parameters())
        if self.in_place: self.learn.loss_grad += penalty
        else: self.learn.loss_grad = self.loss_grad+penalty

@pytest.mark.parametrize('in_place', [False,True])
def test_a_penalty_that_is_added_after_mixed_precision_counts_once_per_step(in_place):
    assert_same_run(*both_runs(cbs=lambda: [CpuLossScaling(init_scale=4.),LatePenalty(in_place)]))
