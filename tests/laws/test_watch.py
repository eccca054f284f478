"""What the loop computes does not depend on what is told

`GradientAccumulation` gives its loop a `Watch`: `Warnings`, which tests and warns. Here, a `Watch` that says nothing
takes its place.
"""
import pytest, sweep, torch
from torch.nn import functional as F
from fastai.callback.core import CancelBatchException
from fastai.vision.all import accuracy
from fastaccum import GradientAccumulation, accumulation
from fastaccum.step.log import Watch
from fastaccum.testing import both_runs, deviation, toy
from common import CallAt, CpuLossScaling, collect_warnings, pick_cases, weights

@pytest.fixture
def silent(monkeypatch): monkeypatch.setattr(accumulation, 'Warnings', lambda learn: Watch())

@pytest.mark.parametrize('seed', pick_cases(12, range(400, 600)))
def test_random_runs_that_nothing_watches_are_full_batch_runs(seed, silent): sweep.check(seed)

def compares_samples(p, y): return F.cross_entropy(p-p.mean(0), y)
def cancel_some(learn):
    if learn.x[0,0]>0.5: raise CancelBatchException

# runs that are warned of, or that callbacks make special
kinds = dict(plain={}, tokens=dict(tokens=True), compares=dict(loss_func=compares_samples),
    split=dict(bs=16, acc=dict(micro_batch_size=4)), rows=dict(acc=dict(log_accum_batch=False)),
    scaled=dict(cbs=lambda: [CpuLossScaling()]),
    cancelled=dict(cbs=lambda: [CallAt('after_loss', cancel_some)]),
    penalty=dict(cbs=lambda: [sweep.penalty()]))

def run(bs=4, acc={}, cbs=lambda: [], **kwargs):
    learn = toy(bs, n=70, metrics=None if 'tokens' in kwargs else accuracy, **kwargs)
    with collect_warnings(): learn.fit_one_cycle(2, 0.05, cbs=[GradientAccumulation(16, **acc),*cbs()])
    return learn

@pytest.mark.parametrize('kind', kinds)
def test_a_run_that_nothing_watches_has_the_same_weights_losses_and_rows(kind, monkeypatch):
    a = run(**kinds[kind])
    monkeypatch.setattr(accumulation, 'Warnings', lambda learn: Watch())
    b = run(**kinds[kind])
    assert weights(a).equal(weights(b))
    assert torch.stack(a.recorder.losses).equal(torch.stack(b.recorder.losses))
    assert (a.recorder.lrs,a.recorder.iters)==(b.recorder.lrs,b.recorder.iters)
    assert [o[:-1] for o in a.recorder.values]==[o[:-1] for o in b.recorder.values]
