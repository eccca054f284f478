"""The promises of the package hold on a GPU, or on a simulated device if there is no GPU.

tests/device.py runs these tests in a separate process. The simulated device, device.cpp, computes on the
CPU.
"""
import device, fastaccum, math, os, pytest, time, torch, traceback, warnings
from copy import deepcopy
from datetime import timedelta
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from torch import distributed as dist, nn
from torch.multiprocessing import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from fastai.vision.all import Callback, CancelFitException, GradientClip, MixedPrecision, Module, RMSProp, accuracy
from fastaccum import (ActivationCheckpoint, FreezeBN, GradientAccumulation, GradientAccumulationSchedule,
    GradientCache, NoiseScale, RecalibrateBN, StateWarning)
from fastaccum.testing import CrossEntropy, assert_same_run, both_runs, deviation, one_cycle, toy, toy_data

if why_not := device.build(): pytest.skip(why_not, allow_module_level=True)
if device.has_device: device.load()
pytestmark = pytest.mark.filterwarnings('ignore')

# Learners

def on_device(bs, where=None, **kwargs):
    "Return a `toy` Learner on the device `where`, by default on the device of these tests"
    learn = toy(bs, **kwargs)
    learn.dls.to(where or device.device())
    learn.model.to(where or device.device())
    return learn

def all_params(model): return [list(model.parameters())]
def with_model(model, bs, **kwargs):
    "Return a Learner on the device, with the model that `model()` returns"
    return on_device(bs, model=lambda: model().double(), splitter=all_params, **kwargs)

class Scaled(MixedPrecision):
    "Mixed precision with a GradScaler and without autocast, which would cast double precision"
    name = 'mixed_precision'
    def before_fit(self):
        self.autocast = torch.autocast(device.kind, enabled=False)
        self.learn.scaler = torch.amp.GradScaler(device.kind, init_scale=2.**10, growth_interval=3)
        self.scales = []
    # do not cast the predictions to single precision, as `MixedPrecision.after_pred` does
    def after_pred(self): pass

class Half(MixedPrecision):
    "fastai's `MixedPrecision` for the device of these tests; fastai's own class supports CUDA only"
    name = 'mixed_precision'
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast(device.kind, dtype=torch.float16)
        self.learn.scaler = torch.amp.GradScaler(device.kind, init_scale=2.**10, growth_interval=3)

class Overflow(Callback):
    "Makes the loss of the batch or micro-batch with sample `i` infinite, in the first epoch"
    # `MixedPrecision`, whose order is 10, scales the loss after this callback
    order,run_valid = 9,False
    def __init__(self, i): self.i = i
    def before_backward(self):
        sample = self.dls.train_ds[self.i][0].to(self.x.device)
        if self.epoch==0 and (self.x==sample).all(-1).any(): self.learn.loss_grad = self.loss_grad*math.inf

# The run is the full-batch run

weight = torch.tensor([1.,2.,.5], dtype=torch.float64)
def counted(learn): return (learn.y>=0).sum()
def with_noise_scale(learn, cbs):
    "Fit with `fit_one_cycle`, and if the fit accumulates, measure the noise scale"
    if not any(isinstance(o, GradientAccumulation) for o in cbs): return one_cycle(learn, cbs)
    meter = NoiseScale(every=1)
    one_cycle(learn, [*cbs,meter])
    assert len(meter.readings)==len(learn.recorder.losses)

kinds = dict(plain={}, split=dict(acc=dict(micro_batch_size=2)), auto=dict(acc=dict(micro_batch_size='auto')),
    dropped=dict(acc=dict(drop_last=True)), tokens=dict(tokens=True),
    weights=dict(tokens=True, loss_func=CrossEntropy(weight=weight)),
    summed=dict(loss_func=CrossEntropy(reduction='sum')), own=dict(acc=dict(n_items=counted)),
    on_cpu=dict(acc=dict(n_items=lambda learn: counted(learn).cpu())),
    clipped=dict(cbs=lambda: [GradientClip(.05)]), scaled=dict(cbs=lambda: [Scaled(),GradientClip(.05)]),
    overflow=dict(cbs=lambda: [Scaled(),Overflow(41)]), noise=dict(fit=with_noise_scale),
    rmsprop=dict(opt_func=RMSProp), metrics=dict(metrics=accuracy),
    flat_cos=dict(fit=lambda learn,cbs: learn.fit_flat_cos(2, .1, cbs=cbs)),
    fine_tune=dict(fit=lambda learn,cbs: learn.fine_tune(1, .1, cbs=cbs)))

@pytest.mark.parametrize('kind', kinds)
def test_the_run_is_the_full_batch_run(kind):
    a,b = both_runs(make=on_device, **kinds[kind])
    assert_same_run(a, b)
    assert {p.device for p in b.model.parameters()}=={device.device()}

def in_single_precision(bs, **kwargs):
    "Return a Learner whose weights and inputs are in single precision"
    learn = on_device(bs, **kwargs)
    x,y = learn.dls.train.dataset.tensors
    learn.dls.train.dataset.tensors = x.float(),y
    learn.model.float()
    return learn

def test_a_run_in_half_precision_differs_from_the_full_batch_run_by_rounding_only():
    "Both runs skip the step in which the loss overflows"
    dtypes = []
    def fit(learn, cbs):
        learn.model[0].register_forward_hook(lambda m, xs, out: dtypes.append(out.dtype))
        one_cycle(learn, cbs)
    a,b = both_runs(make=in_single_precision, fit=fit, cbs=lambda: [Half(),Overflow(41)])
    assert_same_run(a, b, tol=5e-3, loss_tol=5e-3)
    assert torch.float16 in dtypes

# functions that use a part of the package with a Learner
uses = dict(fit=lambda learn: learn.fit(1, .1, cbs=GradientAccumulation(16)),
    auto=lambda learn: learn.fit(1, .1, cbs=GradientAccumulation(16, micro_batch_size='auto')),
    cache=lambda learn: learn.fit(1, .1, cbs=[GradientAccumulation(16),GradientCache(micro_batch_size=2)]),
    checkpoint=lambda learn: learn.fit(1, .1, cbs=[GradientAccumulation(16),ActivationCheckpoint(nn.Linear)]),
    bs_find=lambda learn: learn.bs_find(max_trials=3, show_plot=False),
    accum_check=lambda learn: learn.accum_check(accum_bs=16, steps=2, cbs=GradientAccumulation(16)),
    compared=lambda learn: deviation(learn.model.state_dict(), learn.model.state_dict()))

@pytest.mark.parametrize('use', uses)
def test_a_device_without_double_precision_is_supported(use):
    "Apple's GPUs have no double precision"
    if device.kind!='sim': pytest.skip('needs the simulated device')
    learn = in_single_precision(4, tokens=True)
    with device.without_float64(): res = uses[use](learn)
    assert use!='accum_check' or res.ok, res

# The run on the device is the run on the CPU

def compare_samples(pred, y):
    "Return a loss that compares all samples of a batch with each other"
    return CrossEntropy()(pred-pred.mean(0), y)
def with_batchnorm():
    head = nn.Sequential(nn.Linear(8, 8),nn.Tanh(),nn.Linear(8, 3))
    return nn.Sequential(nn.Linear(5, 8),nn.BatchNorm1d(8),head)
def fit_twice(learn, cbs):
    one_cycle(learn, [GradientAccumulation(16)])
    one_cycle(learn, cbs)

on_both = dict(
    rows=dict(cbs=lambda: [GradientAccumulation(16, log_accum_batch=False)]),
    schedule=dict(cbs=lambda: [GradientAccumulationSchedule(8, 32)]),
    cache=dict(bs=16, loss_func=compare_samples, cbs=lambda: [GradientCache(micro_batch_size=4)]),
    checkpoint=dict(bs=16, model=with_batchnorm, cbs=lambda: [ActivationCheckpoint(nn.Sequential)]),
    recalibrated=dict(model=with_batchnorm, cbs=lambda: [GradientAccumulation(16),RecalibrateBN()]),
    frozen=dict(model=with_batchnorm, cbs=lambda: [GradientAccumulation(16),FreezeBN()], fit=fit_twice),
    found_lr=dict(cbs=lambda: [GradientAccumulation(16)],
        fit=lambda learn,cbs: [learn.add_cbs(cbs),learn.lr_find(num_it=20, show_plot=False)]))

@pytest.mark.parametrize('kind', on_both)
def test_the_run_on_the_device_is_the_run_on_the_cpu(kind):
    def run(where):
        kwargs = dict(dict(bs=4, fit=one_cycle, n=64), **on_both[kind])
        fit,cbs,bs,model = (kwargs.pop(o, None) for o in ('fit','cbs','bs','model'))
        learn = with_model(model, bs, where=where, **kwargs) if model else on_device(bs, where, **kwargs)
        fit(learn, cbs())
        return learn
    assert_same_run(run(torch.device('cpu')), run(device.device()))

def test_the_noise_scale_on_the_device_is_the_noise_scale_on_the_cpu():
    def readings(where):
        learn,meter = on_device(4, where, tokens=True),NoiseScale(every=2)
        learn.fit(2, .01, cbs=[GradientAccumulation(16),meter])
        return [tuple(o) for o in meter.readings]
    assert deviation(readings(torch.device('cpu')), readings(device.device()))<1e-9

def test_accum_check_passes_the_full_batch_run_and_names_batchnorm():
    assert on_device(4).accum_check(cbs=GradientAccumulation(16)).ok
    check = with_model(with_batchnorm, 4).accum_check(cbs=GradientAccumulation(16))
    assert not check.ok and 'BatchNorm1d' in str(check)

def test_accum_find_suggests_the_same_size_as_on_the_cpu():
    def find_accum_bs(where): return on_device(4, where, n=200).accum_find(steps=5, show_plot=False)
    a,b = find_accum_bs(torch.device('cpu')),find_accum_bs(device.device())
    assert a.accum_bs==b.accum_bs and abs(a.scale-b.scale)<1e-9*a.scale

# Synchronization

with_dropout = nn.Sequential(nn.Linear(5, 6),nn.Dropout(),nn.Linear(6, 3))

class WithScale(Module):
    """A model that returns a parameter besides its predictions, as CLIP does

    The parameter does not have a row for each sample.
    """
    def __init__(self): self.lin,self.scale = nn.Linear(5, 3),nn.Parameter(torch.ones(()))
    def forward(self, x): return self.lin(x),self.scale
def scaled_cross_entropy(pred, y): return F.cross_entropy(pred[0]*pred[1], y)

# For each option: arguments of the Learner and of the fit, and how often the device is synchronized in each
# fit, epoch and step
synchronizations = {
    # one micro-batch is compared with its parts
    'plain':      (kinds['plain'], 0, 1, 0),
    'split':      (kinds['split'], 0, 1, 0),
    'auto':       (kinds['auto'], 0, 1, 0),
    'dropped':    (kinds['dropped'], 0, 1, 0),
    # samples have equally many targets, so a trial cannot tell what is counted, and four micro-batches are tried
    'tokens':     (kinds['tokens'], 0, 4, 0),
    'weights':    (kinds['weights'], 0, 5, 0),   # and one copy of the class weights
    'summed':     (kinds['summed'], 0, 1, 0),
    'own':        (kinds['own'], 1, 1, 0),        # checks the first value of `n_items`
    'on_cpu':     (kinds['on_cpu'], 0, 1, 0),
    'clipped':    (kinds['clipped'], 0, 1, 0),
    'scaled':     (kinds['scaled'], 0, 1, 0),
    'metrics':    (kinds['metrics'], 0, 1, 0),
    'rows':       (dict(acc=dict(log_accum_batch=False)), 0, 1, 0),
    'half':       (dict(model=lambda: deepcopy(with_dropout).bfloat16(), splitter=all_params), 0, 2, 0),
    'noise':      (dict(cbs=lambda: [NoiseScale(every=1)]), 0, 1, 1),
    'checkpoint': (dict(cbs=lambda: [ActivationCheckpoint(nn.Linear)]), 0, 1, 0),
    # the second forward pass of the first micro-batch is compared with the first one
    'cache':      (dict(bs=16, cbs=lambda: [GradientCache(micro_batch_size=4)], acc=None), 1, 0, 0),
    # in each batch, the parameters that its four micro-batches return are compared at once; there are half as
    # many batches in validation
    'cache_scale':(dict(bs=16, cbs=lambda: [GradientCache(micro_batch_size=4)], acc=None, splitter=all_params,
        model=lambda: WithScale().double(), loss_func=scaled_cross_entropy), 2, 0, 1.5)}

@pytest.mark.parametrize('option', synchronizations)
def test_how_often_the_device_is_synchronized(option):
    "The number of micro-batches has no influence"
    kwargs,per_fit,per_epoch,per_step = synchronizations[option]
    def counted(n_epoch, n, cbs=list, bs=4, acc={}, **kwargs):
        cbs = cbs()
        if acc is not None: cbs.append(GradientAccumulation(16, **acc))
        learn = on_device(bs, n=n, **kwargs)
        if option=='half': learn.add_cb(ToHalf())
        learn.recorder.train_metrics = option=='metrics'
        with device.synchronizations() as calls: learn.fit(n_epoch, .01, cbs=cbs)
        package,torchs = (str(Path(o.__file__).parent) for o in (fastaccum,torch))
        callers = [next(o for o in files if not o.startswith(torchs)) for files in calls]
        return sum(o.startswith(package) for o in callers)
    for n_epoch,n in ((1,64),(2,64),(1,256)):
        assert counted(n_epoch, n, **kwargs)==per_fit+n_epoch*(per_epoch+n//16*per_step), (n_epoch,n)

class ToHalf(Callback):
    "Casts inputs to the half precision of the model, and predictions to single precision"
    def before_batch(self): self.learn.xb = self.x.bfloat16(),
    def after_pred(self): self.learn.pred = self.pred.float()

# A compiled model that writes its gradients into the same memory each time.
# `torch.compile(mode='reduce-overhead')` makes such a model on CUDA, where a CUDA graph writes the
# gradients

class ToFixedMemory(torch.autograd.Function):
    "A product whose backward pass writes the gradient of `weight` into the same `memory` each time"
    @staticmethod
    def forward(ctx, x, weight, memory):
        ctx.save_for_backward(x, weight)
        ctx.memory = memory
        return x@weight.T
    @staticmethod
    def backward(ctx, grad):
        x,weight = ctx.saved_tensors
        memory = ctx.memory.setdefault('grad', torch.empty_like(weight)).copy_(grad.T@x)
        return grad@weight,memory.detach(),None

class FixedMemory(nn.Linear):
    "A linear layer whose backward pass writes the gradient of its weight into the same memory each time"
    def __init__(self, *args):
        super().__init__(*args, bias=False)
        self.memory = {}
        self.compile(backend='eager')
    @torch.compiler.disable
    def forward(self, x): return ToFixedMemory.apply(x, self.weight, self.memory)

@pytest.mark.parametrize('reduction', ['mean','sum'])
def test_gradients_in_fixed_memory_are_not_overwritten_by_the_next_micro_batch(reduction):
    loss_func = CrossEntropy(reduction=reduction)
    full = with_model(lambda: nn.Sequential(nn.Linear(5, 3, bias=False)), 16, loss_func=loss_func)
    micro = with_model(lambda: nn.Sequential(FixedMemory(5, 3)), 4, loss_func=loss_func)
    one_cycle(full, [])
    one_cycle(micro, [GradientAccumulation(16)])
    assert_same_run(full, micro)

# A second forward pass repeats the random numbers of the first one

class Attention(nn.Module):
    "Attention with dropout and without parameters"
    def forward(self, q): return F.dropout((q@q.mT).softmax(-1), .5, self.training)@q

class AttentionModel(nn.Module):
    "A model with attention between two linear layers"
    def __init__(self):
        super().__init__()
        self.before,self.core,self.after = nn.Linear(5, 8),Attention(),nn.Linear(8, 3)
    def forward(self, x): return self.after(self.core(self.before(x)[:,None].expand(-1, 4, -1)).mean(1))

def fit_seeded(model, bs, *cbs, **kwargs):
    "Seed torch, fit for an epoch, and return the Learner"
    learn = with_model(model, bs, n=32, **kwargs)
    torch.manual_seed(0)
    learn.fit(1, .1, cbs=cbs)
    return learn

def test_a_checkpointed_segment_without_parameters_repeats_its_random_numbers():
    assert_same_run(fit_seeded(AttentionModel, 8), fit_seeded(AttentionModel, 8, ActivationCheckpoint(Attention)))

def test_a_cached_model_repeats_its_random_numbers():
    split = fit_seeded(lambda: deepcopy(with_dropout), 8, GradientAccumulation(8, micro_batch_size=4))
    assert_same_run(split, fit_seeded(lambda: deepcopy(with_dropout), 8, GradientCache(micro_batch_size=4)))

def test_accum_check_does_not_change_the_random_numbers_of_the_next_fit():
    def run(with_check):
        learn = with_model(lambda: deepcopy(with_dropout), 4, n=32)
        torch.manual_seed(0)
        if with_check: learn.accum_check(accum_bs=8)
        learn.fit(1, .1, cbs=GradientAccumulation(8))
        return learn
    assert_same_run(run(False), run(True))

def test_rounding_is_not_taken_for_a_state_of_the_model():
    "Some kernels of a GPU add in another order each time, so a second forward pass differs by rounding"
    n_calls = count()
    class RoundsDifferently(nn.Module):
        def forward(self, x): return x*(1+1e-14*next(n_calls))
    learn = with_model(lambda: nn.Sequential(nn.Linear(5, 3),RoundsDifferently()), 4)
    with warnings.catch_warnings():
        warnings.simplefilter('error', StateWarning)
        learn.fit(1, .1, cbs=GradientAccumulation(16, micro_batch_size=2))

# Memory that runs out

# for each sample, a pass allocates that many numbers of float64
per_sample = 25_000 if device.kind=='sim' else 4_000_000

class InBackward(torch.autograd.Function):
    "The identity function, whose backward pass needs memory for each sample"
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        torch.empty(len(g), per_sample, dtype=torch.float64, device=g.device)
        return g

class NeedsMemory(nn.Module):
    "The identity; `where` is the pass that needs memory for each sample: 'forward', 'backward' or None"
    def __init__(self, where):
        super().__init__()
        self.where = where
    def forward(self, x):
        if self.where=='forward': torch.empty(len(x), per_sample, dtype=torch.float64, device=x.device)
        return InBackward.apply(x) if self.where=='backward' else x

def needing_memory(where):
    "Return a model whose forward or backward pass needs memory for each sample; see `NeedsMemory`"
    body = nn.Linear(5, 64),nn.Tanh(),nn.Linear(64, 64),nn.Tanh()
    return nn.Sequential(*body, NeedsMemory(where), nn.Linear(64, 3))
def memory_for(n_samples): return device.memory_for(int((n_samples+.5)*per_sample*8))

activation = 16*64*8   # bytes: the output of a layer for 16 samples, the batch that fails
def wait_until(condition, seconds=2.):
    "Wait until `condition()` is true, but at most `seconds`"
    end = time.monotonic()+seconds
    while not condition() and time.monotonic()<end: time.sleep(.01)

@pytest.mark.parametrize('where', ['forward','backward'])
@pytest.mark.parametrize('cls', [partial(GradientAccumulation, 16),GradientCache], ids=['split','cache'])
def test_a_micro_batch_that_runs_out_of_memory_is_freed_before_the_cache_is_emptied(cls, where, monkeypatch):
    "The cache is that of CUDA's allocator. The run is the full-batch run"
    full = with_model(partial(needing_memory, None), 16, n=64)
    full.fit(1, .1)
    learn,before,in_use_then = with_model(partial(needing_memory, where), 16, n=64),[],[]
    learn.model.register_forward_pre_hook(lambda *_: before.append(device.memory_in_use()))
    def in_use(): return device.memory_in_use()-before[-1]
    def empty_cache():
        # a failed backward pass ran in a thread of its own, which frees the graph a moment later
        wait_until(lambda: in_use()<activation)
        in_use_then.append(in_use())
    monkeypatch.setattr(torch.cuda, 'empty_cache', empty_cache)
    with memory_for(6): learn.fit(1, .1, cbs=cls(micro_batch_size='auto'))
    assert_same_run(full, learn)
    assert in_use_then and max(in_use_then)<activation

def test_with_auto_validation_batches_that_do_not_fit_are_split():
    learn = with_model(partial(needing_memory, 'forward'), 4, n=64)
    expected = learn.validate()
    with memory_for(6): learn.fit(1, 0., cbs=GradientAccumulation(16, micro_batch_size='auto'))
    assert deviation(learn.recorder.values[0][1:], expected)<2e-6

def test_an_error_is_raised_if_a_single_sample_does_not_fit():
    learn = with_model(partial(needing_memory, 'backward'), 16, n=64)
    before = deepcopy(learn.model.state_dict())
    with memory_for(0), pytest.raises(torch.OutOfMemoryError, match='single sample'):
        learn.fit(1, .1, cbs=GradientAccumulation(16, micro_batch_size='auto'))
    assert deviation(before, learn.model.state_dict())==0

@pytest.mark.parametrize('where', ['forward','backward'])
def test_bs_find_finds_the_size_that_fits_and_leaves_no_memory_in_use(where):
    "`bs_find` also measures the peak of memory of each trial"
    learn = with_model(partial(needing_memory, where), 4, n=64)
    in_use = device.memory_in_use()
    with memory_for(13): found = learn.bs_find('binsearch', show_plot=False)
    assert found.size==13
    assert all(o.peak>=o.size*per_sample*8 for o in found.trials if o.ok)
    assert device.memory_in_use()<=in_use

def test_accum_check_compares_a_micro_batch_with_its_parts_if_a_step_does_not_fit():
    learn = with_model(partial(needing_memory, 'backward'), 4, n=64)
    with memory_for(6): check = learn.accum_check(cbs=GradientAccumulation(16))
    assert check.ok and check.too_many==16

# Interrupts

class Stop(Callback):
    "Raises `exc` when `event` comes for the seventh time, for most events in the middle of a step"
    order = 100
    def __init__(self, event, exc):
        self.n_heard = 0
        def stop():
            self.n_heard += self.training
            if self.training and self.n_heard==7: raise exc('stopped')
        setattr(self, event, stop)

@pytest.mark.parametrize('exc', [KeyboardInterrupt,CancelFitException])
@pytest.mark.parametrize('event', ['after_pred','before_backward','after_backward','after_batch'])
def test_an_interrupt_leaves_nothing_behind(event, exc):
    "The next fit is that of a new Learner with the same weights"
    learn,fresh = on_device(4),on_device(4)
    try: learn.fit(1, .1, cbs=[GradientAccumulation(16),Half(),Stop(event, exc)])
    except KeyboardInterrupt: pass
    assert not torch.is_autocast_enabled(device.kind)
    fresh.model.load_state_dict(deepcopy(learn.model.state_dict()))
    learn.create_opt()
    for o in (fresh,learn): o.fit(1, .1)
    assert deviation(*([o.model.state_dict(),o.recorder.losses] for o in (fresh,learn)))==0

# Two devices

class OnTwoDevices(nn.Module):
    "A model whose second half is on another device than its first half"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5, 6).double().to(device.device(0)),nn.Linear(6, 3).double().to(device.device(1))
    def to(self, *_): return self   # fastai would move the whole model to one device
    def forward(self, x): return self.b(self.a(x).tanh().to(device.device(1)))

class OnDeviceOfPredictions(nn.CrossEntropyLoss):
    "Cross-entropy that moves targets and class weights to the device of the predictions"
    def forward(self, pred, y):
        y,weight = (None if o is None else o.to(pred.device) for o in (y,self.weight))
        return F.cross_entropy(pred.flatten(0, -2), y.flatten(), weight, reduction=self.reduction)

@pytest.mark.parametrize('kind', ['plain','tokens','weights','summed','own','on_cpu','scaled','half'])
def test_the_run_of_a_model_on_two_devices_is_the_full_batch_run(kind):
    if device.n_devices()<2: pytest.skip('needs two devices')
    kwargs = dict(kinds.get(kind, {}))
    loss_func = kwargs.pop('loss_func', CrossEntropy())
    kwargs['loss_func'] = OnDeviceOfPredictions(loss_func.weight, reduction=loss_func.reduction)
    if kind=='scaled': kwargs['cbs'] = lambda: [Scaled()]
    model = (lambda: OnTwoDevices().bfloat16()) if kind=='half' else OnTwoDevices
    if kind=='half': kwargs['cbs'] = lambda: [ToHalf()]
    a,b = both_runs(make=on_device, model=model, splitter=all_params, **kwargs)
    rounding = .05 if kind=='half' else 1e-7
    assert_same_run(a, b, tol=rounding, loss_tol=max(rounding, 2e-6))
    assert {p.device for p in b.model.parameters()}=={device.device(0),device.device(1)}

def test_a_cache_refuses_data_parallel():
    "DataParallel copies the model to devices whose random states the cache cannot restore"
    def model(): return nn.DataParallel(deepcopy(with_dropout).to(device.device()), device_ids=[0])
    with pytest.raises(ValueError, match='DataParallel.*distrib_ctx'):
        fit_seeded(model, 8, GradientCache(micro_batch_size=4))

# Two processes, each with its own device

def learner_of_process(bs, rank, **kwargs):
    "Return a Learner with half of the samples: of every eight, each of two processes has four"
    x,y = toy_data(64).tensors
    mine = torch.arange(64)//4%2==rank
    return on_device(bs, device.device(rank), data=TensorDataset(x[mine], y[mine]), splitter=all_params, **kwargs)

def as_single_process():
    "Return a context in which fastai does not gather the losses of other processes"
    return patch.dict(os.environ, RANK='0', WORLD_SIZE='1')

def the_fit_is_that_of_one_process(rank):
    learn = learner_of_process(4, rank)
    learn.model = DistributedDataParallel(learn.model)
    one_cycle(learn, [GradientAccumulation(16)])
    full = on_device(16, device.device(rank), n=64, splitter=all_params)
    with as_single_process(): one_cycle(full, [])
    assert_same_run(full, learn)

def bs_find_before_the_first_fit(rank):
    "The model is still on the CPU, but the processes must exchange numbers on their devices"
    learn = learner_of_process(4, rank, model=lambda: needing_memory('forward').double())
    learn.model.cpu()
    with memory_for(13-4*rank): found = learn.bs_find('binsearch', show_plot=False)
    assert found.size==9

def the_learning_rates_that_are_found_are_the_same(rank):
    learn = learner_of_process(4, rank)
    learn.model = DistributedDataParallel(learn.model)
    learn.add_cb(GradientAccumulation(16))
    valley = torch.tensor(learn.lr_find(num_it=10, show_plot=False).valley, device=device.device(rank))
    both = [torch.zeros_like(valley) for _ in range(2)]
    dist.all_gather(both, valley)
    assert both[0]==both[1]

def a_cached_fit_is_that_of_one_process(rank):
    learn = learner_of_process(8, rank)
    learn.model = DistributedDataParallel(learn.model)
    one_cycle(learn, [GradientCache(micro_batch_size=4)])
    full = on_device(16, device.device(rank), n=64, splitter=all_params)
    with as_single_process(): one_cycle(full, [])
    assert_same_run(full, learn)

def batchnorm_is_recalibrated_on_all_samples(rank):
    learn = learner_of_process(8, rank, model=lambda: with_batchnorm().double())
    learn.model = DistributedDataParallel(learn.model)
    learn.recalibrate_bn()
    linear,x = learn.model.module[0],toy_data(64).tensors[0].to(device.device(rank))
    with torch.no_grad(): x = linear(x)
    assert deviation(learn.model.module[1].running_mean, x.mean(0))<1e-9

laws_of_processes = [the_fit_is_that_of_one_process, bs_find_before_the_first_fit,
    the_learning_rates_that_are_found_are_the_same, a_cached_fit_is_that_of_one_process,
    batchnorm_is_recalibrated_on_all_samples]

def only_on_devices(exchange):
    "Wrap the function `exchange` of torch.distributed so that it refuses CPU tensors, as NCCL does"
    def checked(*args, **kwargs):
        if any(o.is_cpu for o in tree_leaves(args) if isinstance(o, torch.Tensor)):
            raise RuntimeError('No backend type associated with device type cpu')
        return exchange(*args, **kwargs)
    return checked

def in_process(rank, folder):
    "Run the tests for two processes in this process, and write the results to a file"
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', LOCAL_RANK=str(rank))
    torch.get_device_module(device.kind).set_device(rank)
    dist.init_process_group('nccl' if device.kind=='cuda' else 'gloo', init_method=f'file://{folder}/store',
        rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for nm in ('all_reduce','all_gather','broadcast'): setattr(dist, nm, only_on_devices(getattr(dist, nm)))
    warnings.simplefilter('ignore')
    for law in laws_of_processes:
        result = Path(folder)/f'{law.__name__}-{rank}'
        try: law(rank)
        except BaseException: return result.write_text(traceback.format_exc())
        result.write_text('held')

@lru_cache
def results():
    "Run the tests for two processes; return the result by the name of the test and the rank"
    with TemporaryDirectory() as folder:
        start_processes(in_process, (folder,), 2, start_method='spawn')
        return {o.name:o.read_text() for o in Path(folder).glob('*-?')}

@pytest.mark.parametrize('law', [o.__name__ for o in laws_of_processes])
def test_with_two_processes(law):
    "The law is one of the functions above, and holds on both processes"
    if device.n_devices()<2: pytest.skip('needs two devices')
    for rank in range(2):
        res = results().get(f'{law}-{rank}', 'not run, because another law did not hold')
        assert res=='held', res
