"Micro-batches within a step do not synchronise the GPU, and cost fewer function calls than fastai's batches."
import sys
from contextlib import contextmanager
import pytest, torch
from fastai.vision.all import GradientAccumulation as FastaiGradientAccumulation, noop
from fastaccum import GradientAccumulation, NoiseScale
from fastaccum.core import mean
from fastaccum.testing import CrossEntropy, toy

names = ['item','tolist','cpu','numpy','__bool__','__float__','__int__','__index__','__array__','nonzero']

@contextmanager
def syncs():
    "Collect the names of the tensor methods that are called and would synchronise the GPU"
    seen = []
    def hook(nm, old): return lambda self, *args, **kwargs: (seen.append(nm), old(self, *args, **kwargs))[1]
    with pytest.MonkeyPatch.context() as patch:
        for nm in names: patch.setattr(torch.Tensor, nm, hook(nm, getattr(torch.Tensor, nm)))
        yield seen

def count(cbs, **kwargs):
    "Return the number of synchronisations from each forward pass to the next, in an epoch of 18 micro-batches"
    learn,counts = toy(4, n=70, **kwargs),[]
    with syncs() as seen:
        learn.model.register_forward_pre_hook(lambda *_: counts.append(len(seen)))
        learn.fit_one_cycle(1, 0.01, cbs=cbs)
    return [b-a for a,b in zip(counts[:18], counts[1:18])]

kinds = dict(samples=dict(loss_func=lambda p,y: (p.sum(-1)-y).pow(2).mean()), targets={}, tokens=dict(tokens=True),
    weighted=dict(loss_func=CrossEntropy(weight=torch.tensor([1.,2.,.5], dtype=torch.float64))),
    smoothed=dict(loss_func=CrossEntropy(label_smoothing=0.1)), summed=dict(loss_func=CrossEntropy(reduction='sum')),
    own=dict(acc=dict(n_items=lambda l: (l.y>=0).sum())), untried=dict(loss_func=lambda p,y: (p*torch.rand(1)).mean()))

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('log', [True,False])
def test_no_sync_in_a_micro_batch_that_does_not_step(kind, log, monkeypatch):
    monkeypatch.setattr(mean, 'on_host', lambda t: False)   # treat tensors as if they were on a GPU
    kwargs = dict(kinds[kind])
    acc = kwargs.pop('acc', {})
    plain,ours = count([], **kwargs),count([GradientAccumulation(16, log_accum_batch=log, **acc)], **kwargs)
    steps,tried = [3,7,11,15],[0,1,2,4]   # the loss is tried in these; `n_items` is checked in the first
    assert len(plain)==len(ours)==17 and any(plain)
    for i,(a,b) in enumerate(zip(plain, ours)):
        assert b<=a+(2 if not i else i in steps+tried), f'micro-batch {i}: {b} syncs, {a} without accumulation'

@pytest.mark.parametrize('every', [1,2])
def test_the_noise_scale_synchronises_once_in_a_measured_step(every):
    def run(*cbs): return sum(count([GradientAccumulation(16), *cbs], tokens=True))
    assert run(NoiseScale(every=every))-run()==4//every

def calls(cbs, n):
    "Return the number of calls of Python and C functions in a fit on `n` batches"
    learn,seen = toy(4, n=4*n),[0]
    learn.validate,learn.logger = None,noop
    def profile(frame, what, arg): seen[0] += what in ('call','c_call')
    learn.fit(1, 1e-3, cbs=cbs())
    sys.setprofile(profile)
    try: learn.fit(1, 1e-3, cbs=cbs())
    finally: sys.setprofile(None)
    return seen[0]

def test_a_micro_batch_makes_few_calls():
    "Calls are counted, because times depend on how busy the machine is; `make bench` measures times"
    def each(cbs): return (calls(cbs, 48)-calls(cbs, 16))/32
    plain,stock = each(list),each(lambda: [FastaiGradientAccumulation(64)])
    ours = each(lambda: [GradientAccumulation(64)])
    assert ours<.5*plain and ours<.5*stock, f'{ours:.0f} calls, {plain:.0f} of fastai, {stock:.0f} with its callback'
