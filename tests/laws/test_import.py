"""Importing fastaccum prints nothing, needs no optional package, and changes only two classes of fastai.

The import adds methods to Learner, and replaces `before_fit` of fastai's `GradientAccumulation` by a
method that warns.
"""
import fresh

code = """
from fastai.basics import *
from fastai.callback.all import *
classes = GradientAccumulation,Learner,Callback,Recorder,TrainEvalCallback,ParamScheduler,MixedPrecision
def attributes(): return {o.__name__:dict(vars(o)) for o in classes}
before,cbs = attributes(),list(defaults.callbacks)
for nm in ('wandb','tensorboard','torch.utils.tensorboard'): sys.modules[nm] = None
from fastaccum.all import *
from fastaccum.testing import assert_same_run, both_runs
after = attributes()
for nm in ('accum_find','bs_find','recalibrate_bn','accum_check'): assert after['Learner'].pop(nm)
for nm in ('before_fit','_orig_before_fit'): assert after['GradientAccumulation'].pop(nm)
assert after['GradientAccumulation']=={k:v for k,v in before.pop('GradientAccumulation').items() if k!='before_fit'}
del after['GradientAccumulation']
assert after==before and list(defaults.callbacks)==cbs
assert_same_run(*both_runs())
assert not [o for o in sys.modules if o.split('.')[0] in ('wandb','tensorboard','accelerate') and sys.modules[o]]
"""

def test_importing_changes_only_these_two_classes():
    res = fresh.run(code, quiet=True)
    assert (res.returncode,res.stdout,res.stderr)==(0, '', '')
