"Micro-batches within a step do not synchronize the GPU, and make few function calls."
import sys
from contextlib import contextmanager
import pytest, torch
from fastai.vision.all import GradientAccumulation as FastaiGradientAccumulation, noop
from fastaccum import GradientAccumulation, NoiseScale
from fastaccum.step import mean
from fastaccum.testing import CrossEntropy, toy
from common import CallAt

# methods of a tensor that copy a value to the CPU, and so synchronize a GPU
names = ['item','tolist','cpu','numpy','__bool__','__float__','__int__','__index__','__array__','nonzero']

@contextmanager
def synchronizations():
    "Collect the names of tensor methods that are called in this context and would synchronize a GPU"
    called = []
    def hook(nm, old): return lambda self, *args, **kwargs: (called.append(nm), old(self, *args, **kwargs))[1]
    with pytest.MonkeyPatch.context() as patch:
        for nm in names: patch.setattr(torch.Tensor, nm, hook(nm, getattr(torch.Tensor, nm)))
        yield called

def count_synchronizations(cbs, **kwargs):
    "Return how often each of 18 micro-batches synchronizes, from its forward pass to the next one"
    learn,counts = toy(4, n=70, **kwargs),[]
    with synchronizations() as called:
        # a trial of the loss runs the model without gradients: count its calls with those of the micro-batch
        def note(*_):
            if torch.is_grad_enabled(): counts.append(len(called))
        learn.model.register_forward_pre_hook(note)
        learn.fit_one_cycle(1, 0.01, cbs=cbs)
    return [b-a for a,b in zip(counts[:18], counts[1:18])]

kinds = dict(samples=dict(loss_func=lambda p,y: (p.sum(-1)-y).pow(2).mean()), targets={}, tokens=dict(tokens=True),
    weighted=dict(loss_func=CrossEntropy(weight=torch.tensor([1.,2.,.5], dtype=torch.float64))),
    smoothed=dict(loss_func=CrossEntropy(label_smoothing=0.1)), summed=dict(loss_func=CrossEntropy(reduction='sum')),
    own=dict(acc=dict(n_items=lambda l: (l.y>=0).sum())), untried=dict(loss_func=lambda p,y: (p*torch.rand(1)).mean()))

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('log', [True,False])
def test_a_micro_batch_within_a_step_does_not_synchronize_the_gpu(kind, log, monkeypatch):
    monkeypatch.setattr(mean, 'on_host', lambda t: False)   # treat tensors as if they were on a GPU
    kwargs = dict(kinds[kind])
    acc = kwargs.pop('acc', {})
    plain = count_synchronizations([], **kwargs)
    ours = count_synchronizations([GradientAccumulation(16, log_accum_batch=log, **acc)], **kwargs)
    # some micro-batches may synchronize once more than without accumulation: the last one of each step,
    # and the four whose losses are compared with the losses of their parts. The first one may
    # synchronize twice more, because it also checks `n_items`
    steps,compared = [3,7,11,15],[0,1,2,4]
    assert len(plain)==len(ours)==17 and any(plain)
    for i,(a,b) in enumerate(zip(plain, ours)):
        assert b<=a+(2 if not i else i in steps+compared), f'micro-batch {i}: {b} syncs, {a} without accumulation'

@pytest.mark.parametrize('every', [1,2])
def test_the_noise_scale_synchronizes_once_in_a_measured_step(every):
    def run(*cbs): return sum(count_synchronizations([GradientAccumulation(16), *cbs], tokens=True))
    assert run(NoiseScale(every=every))-run()==4//every

def test_a_fit_looks_for_changed_gradients_and_weights_in_the_first_steps_of_an_epoch_only(monkeypatch):
    """Gradients and weights that a callback changes within a step have another version; reading versions takes time

    The version of the loss is read for each callback that may change it.
    """
    read,after_steps = [],[]
    version = torch.Tensor._version
    def read_version(t):
        read.append(t)
        return version.__get__(t)
    monkeypatch.setattr(torch.Tensor, '_version', property(read_version), raising=False)
    note = CallAt('after_step', lambda _: after_steps.append(len(read)))
    learn = toy(4, n=64, cbs=[GradientAccumulation(16),note])
    for _ in range(2):
        learn.fit(2, 0.1)
        reads = [b-a for a,b in zip([0,*after_steps], after_steps)]
        assert len(reads)==8 and max(*reads[2:4], *reads[6:8])<=16<min(reads[0], reads[4])
        read.clear()
        after_steps.clear()

def count_calls(cbs, n):
    "Return the number of calls of Python and C functions in a fit on `n` batches"
    learn,n_calls = toy(4, n=4*n),[0]
    learn.validate,learn.logger = None,noop
    def profile(frame, what, arg): n_calls[0] += what in ('call','c_call')
    learn.fit(1, 1e-3, cbs=cbs())
    sys.setprofile(profile)
    try: learn.fit(1, 1e-3, cbs=cbs())
    finally: sys.setprofile(None)
    return n_calls[0]

def test_a_micro_batch_makes_less_than_half_the_calls_of_a_batch_of_fastai():
    "Calls are counted, because times depend on how busy the machine is; `make bench` measures times"
    def per_batch(cbs): return (count_calls(cbs, 48)-count_calls(cbs, 16))/32
    plain,stock = per_batch(list),per_batch(lambda: [FastaiGradientAccumulation(64)])
    ours = per_batch(lambda: [GradientAccumulation(64)])
    assert ours<.5*plain and ours<.5*stock, f'{ours:.0f} calls, {plain:.0f} of fastai, {stock:.0f} with its callback'
