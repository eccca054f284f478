"Nothing waits for the device in the middle of a macro-batch."
from contextlib import contextmanager
import pytest, torch
from fastai.callback.core import Callback
from fastaccum import GradientAccumulation
from fastaccum.core import sizes
from fastaccum.testing import CrossEntropy, toy
from test_sizes import w

names = ['item','tolist','cpu','numpy','__bool__','__float__','__int__','__index__','__array__','nonzero']

@contextmanager
def syncs():
    "Note every call by which the host would wait for a tensor of the device"
    seen,old = [],{nm:getattr(torch.Tensor, nm) for nm in names}
    def hook(nm):
        def f(self, *args, **kwargs):
            seen.append(nm)
            return old[nm](self, *args, **kwargs)
        return f
    for nm in names: setattr(torch.Tensor, nm, hook(nm))
    try: yield seen
    finally:
        for nm in names: setattr(torch.Tensor, nm, old[nm])

class PerBatch(Callback):
    "How many syncs each micro-batch made"
    order,run_valid = -1000,False
    def __init__(self, seen): self.seen,self.counts = seen,[]
    def before_batch(self): self.start = len(self.seen)

class End(Callback):
    order,run_valid = 1000,False
    def __init__(self, begin): self.begin = begin
    def after_batch(self): self.begin.counts.append(len(self.begin.seen)-self.begin.start)

def count(cbs, **kwargs):
    "Syncs of each micro-batch in a fit with `cbs`"
    learn = toy(4, n=70, **kwargs)
    with syncs() as seen:
        begin = PerBatch(seen)
        learn.fit_one_cycle(1, 0.01, cbs=[begin,End(begin)]+cbs)
    return begin.counts

kinds = dict(samples=dict(loss_func=torch.nn.functional.mse_loss), targets=dict(), tokens=dict(tokens=True),
             weighted=dict(loss_func=CrossEntropy(weight=w)),
             smoothed=dict(loss_func=CrossEntropy(label_smoothing=0.1)),
             summed=dict(loss_func=CrossEntropy(reduction='sum')))

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('log', [True,False])
def test_no_sync_in_a_micro_batch_that_does_not_step(kind, log, monkeypatch):
    monkeypatch.setattr(sizes, 'on_host', lambda t: False)   # as on a device
    kwargs = kinds[kind]
    if kind=='samples': kwargs = dict(loss_func=lambda p,y: (p.sum(-1)-y).pow(2).mean())
    plain,acc = count([], **kwargs),count([GradientAccumulation(16, log_accum_batch=log)], **kwargs)
    closing,probed = [3,7,11,15,17],0   # the first micro-batch is where the loss is probed, once in a fit
    assert len(plain)==len(acc)==18
    for i,(a,b) in enumerate(zip(plain, acc)):
        assert b<=a if i not in (probed,*closing) else b<=a+1, f'micro-batch {i}: {b} syncs, {a} without accumulation'

def test_a_sync_would_be_seen():
    "The hooks work: a callback that asks for a number is counted"
    class Sync(Callback):
        run_valid = False
        def after_loss(self): self.learn.loss.item()
    assert all(b==a+1 for a,b in zip(count([]), count([Sync()])))

def test_size_of_your_own_on_the_device():
    assert sum(count([GradientAccumulation(16, size=lambda l: (l.y>=0).sum())]))<=sum(count([]))+5

def test_overhead_is_not_above_fastais():
    "A micro-batch costs no more than with fastai's callback (`make bench` says how much less)"
    import statistics, sys
    from pathlib import Path
    sys.path.insert(0, str(Path(__file__).parent.parent/'benchmarks'))
    import overhead
    overhead.rounds,overhead.n_batches = 5,200
    times = overhead.measure(overhead.mse, 4)
    ratio = statistics.median(a/b for a,b in zip(times['fastaccum'], times["fastai's GradientAccumulation"]))
    assert ratio<=1, f"{ratio:.2f} of the time of fastai's callback"
