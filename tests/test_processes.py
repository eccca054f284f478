"Several processes: the run is that of one process on the whole macro-batch, and gradients are exchanged once per step."
import subprocess, sys
import pytest
from fastai.callback.tracker import SaveModelCallback
from fastai.optimizer import Adam
from fastaccum import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.testing import deviation, toy
from common import Raise
from launch import check, end, launching, script_of

script,cases = script_of('processes.py')
on_three = ['even','ragged','uneven','hardly_any_samples_on_one','micro_batches_of_different_sizes','tokens',
    'drop_last','start_epoch',
    'lr_find','resume','one_ends_its_fit','split','split_in_schedules','half',
    'train_metrics','schedules','random_runs','one_leaves_out_micro_batches','distrib_ctx']

launches = launching(script, {2:cases+['fault_interrupt'], 3:on_three+['fault_exception']})

@pytest.mark.parametrize('case', cases)
def test_two_processes(launches, case): check(launches, 2, case)

@pytest.mark.parametrize('case', on_three)
def test_three_processes(launches, case): check(launches, 3, case)

@pytest.mark.parametrize('n', [2,3])
def test_a_fault_on_one_process_ends_all(launches, n):
    """The last thing to happen in each launch: an interrupt or an exception on one process; its model exchanges
    gradients again, and all end"""
    text,rc = end(launches, n)
    assert rc not in (None,0), f'ended with {rc}: {text[-3000:]}'
    assert 'the flag is on' in text, text[-3000:]

def test_importing_fastaccum_imports_no_accelerate():
    code = "import sys, fastaccum.all; assert not {'accelerate','fastai.distributed'}&set(sys.modules)"
    subprocess.run([sys.executable, '-c', code], check=True, cwd=script.parent.parent, timeout=300)

def test_resumed_on_one_process(tmp_path):
    "From what SaveModelCallback saved: the weights of a run that was not interrupted, to the bit"
    def run(fit, acc):
        learn = toy(4, n=70, shuffle=True, opt_func=Adam, path=tmp_path)
        fit(learn, [acc(),SaveModelCallback(every_epoch=True, with_opt=True)])
        return learn
    def whole(learn, cbs, **kwargs): learn.fit_one_cycle(4, 0.05, wd=0.1, cbs=cbs, **kwargs)
    def dies(learn, cbs):
        with pytest.raises(RuntimeError): whole(learn, [*cbs,Raise('after_backward', RuntimeError, 5, at=18*2+5)])
    def resumes(learn, cbs):
        learn.load('model_1', with_opt=True)
        for _ in range(2): learn.dls.train.get_idxs()   # a loader that shuffles goes on where it was
        whole(learn, cbs, start_epoch=2)
    for acc in (lambda: GradientAccumulation(16), lambda: GradientAccumulation(16, drop_last=True),
                lambda: GradientAccumulationSchedule(8, 24), lambda: GradientAccumulation(16, micro_batch_size='auto')):
        a,_,b = (run(o, acc) for o in (whole,dies,resumes))
        assert deviation(a.model.state_dict(), b.model.state_dict())==0
        assert deviation(a.opt.state_dict(), b.opt.state_dict())==0
