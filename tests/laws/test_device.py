"""What is promised holds on a device other than the CPU, too: a GPU, or without one the simulated device of device.cpp.

tests/device.py says how these laws are run. On the simulated device the kernels are the CPU's.
"""
import pytest, torch, device
from torch import nn
from fastai.vision.all import Callback, GradientClip, MixedPrecision
from fastaccum import GradientAccumulation, NoiseScale
from fastaccum.testing import CrossEntropy, assert_same_run, both_runs, one_cycle, toy

if why_not := device.build(): pytest.skip(why_not, allow_module_level=True)
if device.has_device: device.load()
pytestmark = pytest.mark.filterwarnings('ignore')

def on_device(bs, where=None, **kwargs):
    "`toy` on the device, or on the device `where`"
    learn = toy(bs, **kwargs)
    learn.dls.to(where or device.device())
    learn.model.to(where or device.device())
    return learn

class Scaled(MixedPrecision):
    "The GradScaler without half precision, so that runs can be compared to the last digit"
    name = 'mixed_precision'
    def before_fit(self):
        self.autocast = torch.autocast(device.kind, enabled=False)
        self.learn.scaler,self.scales = torch.amp.GradScaler(device.kind, init_scale=2.**10, growth_interval=3),[]
    def after_pred(self): pass   # fastai's makes single precision

weight = torch.tensor([1.,2.,.5], dtype=torch.float64)
def counted(learn): return (learn.y>=0).sum()
kinds = dict(plain={}, split=dict(acc=dict(micro_batch_size=2)), auto=dict(acc=dict(micro_batch_size='auto')),
    dropped=dict(acc=dict(drop_last=True)), tokens=dict(tokens=True),
    weights=dict(tokens=True, loss_func=CrossEntropy(weight=weight)), summed=dict(loss_func=CrossEntropy(reduction='sum')),
    own=dict(acc=dict(n_items=counted)), on_host=dict(acc=dict(n_items=lambda l: counted(l).cpu())),
    clipped=dict(cbs=lambda: [GradientClip(.05)]), scaled=dict(cbs=lambda: [Scaled(),GradientClip(.05)]))

@pytest.mark.parametrize('kind', kinds)
def test_the_run_is_the_full_batch_run(kind):
    a,b = both_runs(make=on_device, **kinds[kind])
    assert_same_run(a, b)
    assert {p.device for p in b.model.parameters()}=={device.device()}
