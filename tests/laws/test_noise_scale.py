"`NoiseScale` measures the noise of gradients without bias, and does not change the run."
import math
from functools import partial
import numpy as np, pytest, torch
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import TensorDataset
from fastai.vision.all import Adam, CancelBackwardException, CancelStepException, GradientClip, OptimWrapper
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientCache, NoiseScale
from fastaccum.testing import CrossEntropy, deviation, toy, toy_data
from common import (CpuLossScaling, CpuMixedPrecision, LimitedMemory, RaiseAt, RecordAt, learnable_data,
    overflow_at_step, runs_out_on_attempts)
from small_learners import all_params

def learner(bs, n, **kwargs): return toy(bs, **dict(data=learnable_data(n))|kwargs)
def measured(meter):
    "Return tr Σ and |G|² as the callback has measured them"
    return meter.trace,meter.grad_sq
def close(a, b, rtol=1e-9): return np.allclose(a, b, rtol=rtol, atol=0)

def single_gradients(learn):
    "Return a matrix whose rows are the gradients of each sample, or of each target that is not ignored"
    res = []
    for x,y in zip(*learn.dls.train.dataset.tensors):
        ys = [torch.where(torch.arange(len(y))==i, y, -100) for i in range(len(y)) if y[i]!=-100] if y.ndim else [y]
        for o in ys:
            gs = torch.autograd.grad(CrossEntropy()(learn.model(x[None]), o[None]), list(learn.model.parameters()))
            res.append(torch.cat([g.flatten() for g in gs]))
    return torch.stack(res)

def trace_and_grad_sq(gs, sizes):
    "Return tr Σ and |G|² by analysis of variance, for gradients `gs` of samples in groups of these sizes"
    mean = gs.mean(0)
    spread = sum(n*(g.mean(0)-mean).square().sum() for n,g in zip(sizes, gs.split(sizes)))
    trace = spread/(len(sizes)-1)
    return trace.item(),(mean.square().sum()-trace/sum(sizes)).item()

def measure(n_epoch=1, *, n=18, accum_bs=100, bs=4, cbs=(), acc={}, freeze=False, model=None, **kwargs):
    """Fit and measure with a learning rate of 0

    By default, a step of micro-batches of 4, 4, 4, 4 and 2 samples.
    """
    if model: kwargs |= dict(model=model, splitter=all_params)
    learn,meter = learner(bs, n, **kwargs),NoiseScale(every=1)
    if freeze: learn.freeze()
    learn.fit(n_epoch, 0., wd=0., cbs=[GradientAccumulation(accum_bs, **acc), meter, *cbs])
    return learn,meter

# What is measured

def other_backward_pass(l): torch.autograd.grad(l.model(*l.xb).sum(), list(l.model.parameters()))
def with_limited_memory():
    "Return a model that runs out of memory after the first micro-batch, and uses one layer twice"
    lin,memory = nn.Linear(5, 5),LimitedMemory(runs_out_on_attempts(range(1, 99), 'backward', 2))
    return nn.Sequential(nn.Linear(5, 5), memory, lin, nn.Tanh(), lin, nn.Linear(5, 3)).double()

summed,padded = dict(loss_func=CrossEntropy(reduction='sum')),learnable_data(18, True)
padded.tensors[1][8:12] = -100   # the third micro-batch has only padding, so it does not count
n_targets = [n for n in ((o!=-100).sum().item() for o in padded.tensors[1].split(4)) if n]
ragged = [4]*4+[2]
def left_out(event, exc, skip): return lambda: dict(cbs=[RaiseAt(event, exc, 20, skip=skip)])
# Each case: a function that returns arguments of `measure`, and the sizes of the micro-batches that
# count
cases = dict(plain=(dict, ragged), summed=(lambda: summed, ragged),
    scaled=(lambda: dict(cbs=[CpuLossScaling()]), ragged),
    clipped=(lambda: dict(cbs=[GradientClip(1e-3)]), ragged),
    all=(lambda: summed|dict(cbs=[CpuLossScaling(),GradientClip(1e-3)]), ragged),
    torchs=(lambda: dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), ragged),
    other_backward_passes=(lambda: dict(cbs=[RecordAt('after_backward', other_backward_pass, order=-50)]), ragged),
    two=(lambda: dict(bs=3, n=6), [3,3]), ones=(lambda: dict(bs=1, n=9), [1]*9),
    tokens_scaled=(lambda: dict(data=padded, cbs=[CpuLossScaling()]), n_targets),
    out_of_memory=(lambda: dict(model=with_limited_memory, acc=dict(micro_batch_size='auto')), [4]+[2]*7),
    frozen=(lambda: dict(freeze=True), ragged),   # frozen parameters are left out of the noise
    backward_left_out=(left_out('before_backward', CancelBackwardException, 1), [4,4,4,2]),
    last_left_out=(left_out('before_backward', CancelBackwardException, 4), [4]*4))

@pytest.mark.filterwarnings('ignore:memory ran out')
@pytest.mark.parametrize('nm', cases)
def test_the_measured_noise_is_that_of_the_gradients_of_single_samples(nm):
    make,sizes = cases[nm]
    learn,meter = measure(**make())
    learn.unfreeze()
    gs = single_gradients(learn)
    if nm=='frozen': gs = gs[:,sum(p.numel() for p in learn.model[:2].parameters()):]
    if 'left' in nm: gs = gs[:16] if nm=='last_left_out' else torch.cat([gs[:4],gs[8:]])
    expected = trace_and_grad_sq(gs, sizes)
    # the weight of a micro-batch, by its tokens, is in single precision
    rtol = 1e-5 if nm=='tokens_scaled' else 1e-9
    assert close(measured(meter), expected, rtol)
    assert close(meter.noise_scale, expected[0]/expected[1], 1e-5) and learn.recorder.noise_scale==[meter.noise_scale]
    unit = 'targets' if 'tokens' in nm else 'samples'
    n,scale = sum(sizes),meter.noise_scale
    # how many more steps and samples such steps need than the minimum (McCandlish et al., 2018)
    costs = f' {1+n/scale:.1f}x the minimum number of {unit} ',f' {1+scale/n:.1f}x the minimum'
    for o in (f'{n:,} per step ',f' {unit}:',*costs): assert o in meter.verdict()

@pytest.mark.parametrize('kind', ['fp16','bf16','parameters'])
def test_half_precision_changes_the_measurement_by_rounding_only(kind):
    x,y = learnable_data(18).tensors
    def run(dtype, *cbs):
        def net(): return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
        return measured(measure(data=TensorDataset(x.to(dtype), y), model=net, cbs=cbs)[1])
    half = run(torch.bfloat16) if kind=='parameters' else run(torch.float32, CpuMixedPrecision(amp_mode=kind))
    assert close(half, run(torch.float64), 8*torch.finfo(torch.float16 if kind=='fp16' else torch.bfloat16).eps)

# Over the steps of a fit

def test_older_measurements_count_less():
    "After 20 more steps, a measurement has half its weight; a shorter step counts as a part of a step"
    learn,meter = learner(4, 70),NoiseScale(every=1)
    averages = RecordAt('after_step', lambda l: measured(meter), order=100)
    learn.fit(1, 0., wd=0., cbs=[GradientAccumulation(16), meter, averages])
    sums,weight = 0,0
    for part,now in zip(single_gradients(learn).split(16), averages.values, strict=True):
        keep = .5**(len(part)/16/20)
        of_step = np.array(trace_and_grad_sq(part, [len(o) for o in part.split(4)]))
        sums,weight = keep*sums+(1-keep)*of_step,keep*weight+1-keep
        assert close(now, sums/weight)

def test_the_recorder_has_a_noise_scale_for_each_step():
    """With `every=3`, every third step is measured, and the plot shows the measured steps

    Each fit begins anew.
    """
    learn = learner(4, 70, cbs=[GradientAccumulation(16), NoiseScale(every=3)])
    for _ in range(2):
        learn.fit_one_cycle(2, 1e-2)
        rec,ax = learn.recorder.noise_scale,learn.noise_scale.plot()
        assert len(rec)==len(learn.recorder.losses)==10 and rec[-1]==learn.noise_scale.noise_scale
        assert [a==b for a,b in zip(rec, rec[1:])]==[True,True,False]*3
        assert [list(o.get_ydata()) for o in ax.lines]==[rec[::3],[16,16,16,6]]
        assert list(ax.lines[0].get_xdata())==[0,3,6,9]
        plt.close('all')

@pytest.mark.parametrize('order', [None,9])
def test_the_recorder_has_a_noise_scale_for_a_skipped_step(order):
    "A step that overflows is not measured, so it has the noise scale of the previous step"
    cancel = RaiseAt('before_step', CancelStepException, order, skip=2)
    cbs = [cancel] if order else [overflow_at_step(2),CpuLossScaling()]
    learn = learner(4, 64)
    learn.fit(1, .1, cbs=[GradientAccumulation(16), NoiseScale(every=1), *cbs])
    rec = learn.recorder.noise_scale
    assert len(rec)==len(learn.recorder.losses)==4 and np.isfinite(rec).all()
    assert rec[0]!=rec[1] and rec[2]!=rec[3] and (rec[1]==rec[2] or order)

def test_if_steps_grow_measurements_begin_at_steps_of_two_micro_batches():
    learn = learner(8, 64)
    with pytest.warns(UserWarning, match='one micro-batch') as w:
        learn.fit(2, .1, cbs=[GradientAccumulationSchedule(8, 32, start=1, finish=1), NoiseScale(every=1)])
    assert np.isnan(learn.recorder.noise_scale).tolist()==[True]*8+[False]*2 and len(w)==1

# Nothing else changes

def test_training_is_the_same_to_the_bit():
    def run(*more):
        learn = learner(4, 70, data=learnable_data(70, True), opt_func=Adam)
        learn.fit_one_cycle(2, .1, cbs=[GradientAccumulation(16), GradientClip(.5), CpuLossScaling(), *more])
        return [*learn.model.parameters()],learn.recorder.losses,learn.opt.state_dict()['state']
    assert deviation(run(), run(NoiseScale(every=1)))==0

# Messages

class Zeros(nn.Linear):
    "A linear layer whose weights begin with 0"
    def reset_parameters(self): [nn.init.zeros_(p) for p in self.parameters()]

def test_the_verdict_says_that_noise_hides_the_gradient():
    "With weights of 0, samples x and -x of each class, and classes of equal size, the gradient is 0"
    x,y = toy_data(6).tensors[0],torch.arange(6)%3
    _,meter = measure(data=TensorDataset(torch.cat([x,-x]), torch.cat([y,y])), model=lambda: Zeros(5, 3).double())
    assert meter.grad_sq<0 and meter.noise_scale==math.inf and 'hides' in meter.verdict()

def lengthen_gradients(l):
    for p in l.model.parameters(): p.grad *= 9
def no_gradient(l):
    if l.gradient_accumulation.current_step.micro.i==1: l.loss_grad = l.loss_grad.detach()

@pytest.mark.parametrize('kwargs,match', [(dict(accum_bs=4),'one micro-batch'),
    (dict(cbs=[RecordAt('before_step', lengthen_gradients, order=9)]),'longer'),
    (dict(cbs=[GradientCache(micro_batch_size=2)]),'in parts'),
    (dict(cbs=[RecordAt('after_loss', no_gradient)]),'needs no gradient')])
def test_what_cannot_be_measured_is_warned_of_once(kwargs, match):
    with pytest.warns(UserWarning, match=match) as w: _,meter = measure(2, **kwargs)
    assert len([o for o in w if 'NoiseScale' in str(o.message)])==1
    assert not meter.readings and math.isnan(meter.noise_scale) and 'nothing was measured' in meter.verdict()
