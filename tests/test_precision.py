"Mixed precision, with a GradScaler that really scales, unscales, finds infinities, halves and skips."
import pytest, torch
from torch import nn
from torch.amp import autocast
from fastai.callback.core import Callback
from fastai.callback.fp16 import AMPMode
from fastai.callback.training import GradientClip
from fastai.optimizer import Adam
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_twins, deviation, toy, twins
from common import CpuMixedPrecision, Seen, grads, weights

class Scaled(CpuMixedPrecision):
    "The GradScaler without the half precision, so that runs can be compared to the last digit"
    def before_fit(self):
        super().before_fit()
        self.autocast = autocast('cpu', enabled=False)

def fit2(learn, cbs): learn.fit_one_cycle(2, 0.05, cbs=cbs)

class Overflow(Callback):
    "Make the gradient of the micro-batch that holds sample `i` infinite"
    order,run_valid = 9,False   # after us, before the scale
    def __init__(self, x, epoch=0): self.x0,self.epoch_ = x,epoch
    def before_backward(self):
        if self.epoch==self.epoch_ and (self.x==self.x0).all(-1).any():
            self.learn.loss_grad = self.loss_grad*float('inf')

@pytest.mark.parametrize('kwargs', [dict(), dict(n=67, shuffle=True), dict(tokens=True, n=67),
                                    dict(macro=10, n=71, opt_func=Adam),
                                    dict(n=70, acc=dict(drop_last=True))], ids=str)
@pytest.mark.parametrize('clip', [None,0.05])
def test_scaled_twins(kwargs, clip):
    "With loss scaling and clipping the run is the twin's"
    cbs = lambda: [Scaled(init_scale=2.**10, growth_interval=3)] + ([GradientClip(clip)] if clip else [])
    a,b = twins(fit=fit2, cbs=cbs, **kwargs)
    assert_twins(a, b)

@pytest.mark.parametrize('i', [0,21,41,69])
def test_overflow_skips_exactly_its_macro_batch(i):
    "An infinite gradient in one micro-batch skips its step, halves the scale once, and no other step notices"
    x = toy(4, n=70).dls.train_ds[i][0]
    def cbs():
        o = Scaled(init_scale=2.**10)
        s = Seen('before_step', lambda l: l.scaler.get_scale(), order=9)
        seen.append(s)
        return [o,s,Overflow(x)]
    seen = []
    a,b = twins(fit=fit2, cbs=cbs, n=70)
    assert_twins(a, b)
    assert seen[0].values==seen[1].values and set(seen[0].values)=={2.**10,2.**9}
    assert seen[0].values.index(2.**9)==i//16+1      # of 16 samples each
    clean = twins(fit=fit2, cbs=lambda: [Scaled(init_scale=2.**10)], n=70)[1]
    assert deviation(weights(clean), weights(b))>1e-5   # it did skip

def test_scale_is_constant_within_a_macro_batch():
    "With a scale that doubles after every step, all micro-batches of a macro-batch are scaled alike"
    seen = Seen('before_backward', lambda l: (l.gradient_accumulation.macro.samples, l.scaler.get_scale()), order=9)
    learn = toy(4, n=70)
    learn.fit(1, 0.05, cbs=[GradientAccumulation(16), Scaled(init_scale=2., growth_interval=1), seen])
    steps = [i for i,(n,_) in enumerate(seen.values) if n==0]
    assert len(seen.values)==18 and steps==[0,4,8,12,16]
    assert [s for _,s in seen.values]==[2.**(1+i//4) for i in range(18)]

def test_clip_acts_once_on_the_unscaled_mean_gradient():
    big,small = (Seen('after_step', grads, order=12) for _ in range(2))
    raw = Seen('before_step', lambda l: (torch.cat([g.flatten() for g in grads(l)]).norm().item()), order=10.5)
    a = toy(16, n=64); a.fit(1, 0.05, cbs=[Scaled(), GradientClip(0.05), big])
    b = toy(4, n=64);  b.fit(1, 0.05, cbs=[GradientAccumulation(16), Scaled(), GradientClip(0.05), small, raw])
    assert len(big.values)==len(small.values)==len(raw.values)==4
    assert deviation(big.values, small.values)<1e-12
    for gs,norm in zip(small.values, raw.values):
        assert norm>0.05 and abs(torch.cat([g.flatten() for g in gs]).norm().item()-0.05)<1e-6

@pytest.mark.parametrize('mode', list(AMPMode))
def test_half_precision_on_the_cpu(mode):
    "Real half precision: micro-batches are rounded separately, so twins agree to its precision, and logs are unscaled"
    def make(bs, **kwargs):
        learn = toy(bs, model=lambda: nn.Sequential(nn.Linear(5,16), nn.ReLU(), nn.Linear(16,3)),
            splitter=lambda m: [list(m.parameters())], **kwargs)
        for ds in (learn.dls.train_ds,):
            ds.tensors = tuple(t.float() if t.is_floating_point() else t for t in ds.tensors)
        return learn
    seen = Seen('after_pred', lambda l: l.model[0](l.x).dtype)
    a,b = twins(make=make, fit=fit2, cbs=lambda: [CpuMixedPrecision(amp_mode=mode), seen], n=70)
    half = dict(fp16=torch.float16, bf16=torch.bfloat16)[mode.value]
    assert set(seen.values)=={half}, 'nothing ran in half precision'
    tol = 4*torch.finfo(half).eps
    assert_twins(a, b, tol=tol, loss_tol=tol)
    # scaled by 65536 it would be larger
    assert not any(l.isnan() for l in b.recorder.losses) and max(b.recorder.losses)<3

def test_remainder_settled_after_training_ends_early_is_unscaled():
    "A remainder that is stepped in `after_train` goes through the scaler as well"
    from common import Raise
    from fastai.callback.core import CancelTrainException
    def run(bs, macro, at):
        learn = toy(bs, n=64)
        learn.fit(1, 0.05, cbs=[Scaled(init_scale=2.**10),
            Raise('after_batch', CancelTrainException, 100, at)]+([GradientAccumulation(macro)] if macro else []))
        return learn
    b = run(4, 16, at=5)                # six micro-batches: 16 samples and 8
    a = toy(16, n=64)
    a.dls.train.get_idxs = lambda: list(range(24))
    a.dls.train.n = 24
    a.fit(1, 0.05, cbs=Scaled(init_scale=2.**10))
    assert deviation(weights(a), weights(b))<1e-12
    assert len(b.recorder.losses)==2 and deviation(a.recorder.losses, b.recorder.losses)<1e-6
