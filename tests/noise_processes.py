"""The noise meter on several processes: launched by test_noise.py, as processes.py is by test_processes.py.

Each reading is that of all processes' micro-batches, worked out by each process from the gradients of single samples.
"""
import sys, warnings
import numpy as np, torch
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastaccum import GradientAccumulation, NoiseScale, ScaledLR
from fastaccum.testing import CrossEntropy, toy, toy_data
import processes
from processes import Batches, cut, even, learner, orders, rank, same_everywhere, uneven, world
from common import weights
from test_noise import Scaled, by_hand, each_gradient

def micro_batches(ns, micro):
    "For each step of 16 samples a process, its micro-batches on all processes, as lists of samples"
    own = [[cut(s, micro) for s in cut(o, 16)] for o in orders(ns)[0]]
    return [sum([o[i] for o in own if i<len(o)], []) for i in range(max(map(len, own)))]

def fit(ns, micro=4, tokens=False, meter=None, acc=None, cbs=(), lr=0., **kwargs):
    ds = toy_data(sum(ns), tokens)
    learn = learner(Batches(ds, [cut(o[rank], micro) for o in orders(ns)], micro), ds, **kwargs)
    learn.model = DDP(learn.model)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, lr, wd=0., cbs=[GradientAccumulation(16*world, **(acc or {})), *([meter] if meter else []), *cbs])
    return learn,ds

def check(ns, micro=4, tokens=False, rtol=1e-9, left_out=(), **kwargs):
    meter = NoiseScale(every=1)
    learn,ds = fit(ns, micro, tokens, meter, **kwargs)
    model = toy(4).model
    def gradients(idxs):
        part = torch.utils.data.TensorDataset(*ds[idxs])
        return each_gradient(model, part, CrossEntropy(), tokens)
    want,sizes = [],[]
    for i,step in enumerate(micro_batches(ns, micro)):
        gs = [o for o in map(gradients, step)]
        sizes.append(sum(map(len, gs)))
        if i not in left_out: want.append(by_hand(torch.cat(gs), [len(o) for o in gs]))
    got = [o.values.sum(1) for o in meter.readings]
    assert np.allclose(got, want, rtol=rtol, atol=0), (got, want)
    assert [o.size for o in meter.readings]==[o for i,o in enumerate(sizes) if i not in left_out]
    assert len(learn.recorder.noise_scale)==len(sizes)==len(learn.recorder.losses)
    same_everywhere(torch.tensor([meter.trace,meter.grad_sq], dtype=torch.float64))
    assert not any(p._backward_hooks for p in learn.model.parameters())

def case_even(): check(even())
def case_ragged(): check(even(35))
def case_uneven(): check(uneven())
def case_hardly_any_samples_on_one(): check([40,3,1][:world])
def case_exchange_each(): check(even(35), acc=dict(sync_each=True))
def case_tokens(): check(uneven(), tokens=True)
def case_a_loss_that_sums(): check(even(35), loss_func=CrossEntropy(reduction='sum'))
def case_scaled_and_clipped(): check(even(35), cbs=[Scaled(init_scale=2.**10), GradientClip(1e-3)], rtol=1e-5)
def case_one_micro_batch_each(): check(even(), micro=16)

class Overflow(Callback):
    "The gradient of one process overflows"
    order,run_valid = 9,False
    def before_backward(self):
        if self.iter==5 and rank==world-1: self.learn.loss_grad = self.loss_grad*float('inf')

def case_overflow_on_one(): check(even(48), cbs=[Scaled(init_scale=2.**10), Overflow()], left_out=(1,), rtol=1e-5)

def case_weights_are_the_same_to_the_bit():
    for ns,kwargs in ((uneven(),{}), (uneven(),dict(tokens=True)), (even(35),dict(acc=dict(sync_each=True)))):
        a,b = (fit(ns, meter=o, lr=0.1, **kwargs)[0] for o in (None,NoiseScale(every=1)))
        assert torch.equal(weights(a), weights(b))

def case_learning_rates_follow_the_size_over_all_processes():
    learn,_ = fit(even(35), lr=0.01, cbs=[ScaledLR(8)])
    assert learn.recorder.lrs==[.01*2*world]*3
    learn,_ = fit(uneven(), lr=0.01, cbs=[ScaledLR(8, remainder=True)])   # the last step has samples of one process
    assert [o/.01*8 for o in learn.recorder.lrs][0]==16*world and learn.recorder.lrs[-1]==.01
    same_everywhere(torch.tensor(learn.recorder.lrs, dtype=torch.float64))

if __name__=='__main__':
    mine = {k:v for k,v in globals().items() if getattr(v, '__module__', '')==__name__}
    processes.main(*sys.argv[1:], cases=processes.cases_of(mine))
