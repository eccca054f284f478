"Losses, hyper-parameters and metrics are recorded once a step, with the full-batch run's numbers."
import pytest
from fastai.vision.all import AvgLoss, CancelBatchException, Perplexity, accuracy
from fastaccum import GradientAccumulation
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, toy, both_runs
from common import RaiseAt, RecordAt, weights
from sweep import metered
from test_same_run import run_lr_find, within

def metrics(): return [accuracy,AvgLoss(),Perplexity()]

@pytest.mark.parametrize('n,accum_bs,kwargs', [(64,16,{}), (71,10,{}), (70,100,{}),
    (70,16,dict(acc=dict(drop_last=True))), (70,16,dict(loss_func=CrossEntropy(reduction='sum'), metrics=accuracy))])
def test_the_records_are_those_of_the_full_batch_run(n, accum_bs, kwargs):
    "One of the training metrics is computed from predictions, and two are computed from the loss"
    a,b = both_runs(n=n, accum_bs=accum_bs, make=lambda bs,**kw: metered(bs, **{'metrics':metrics(), **kw}),
        fit=lambda l,cbs: l.fit_one_cycle(3, 0.01, cbs=cbs), **kwargs)
    assert_same_run(a, b)
    assert list(a.recorder.metric_names)==list(b.recorder.metric_names) and a.recorder.lrs==b.recorder.lrs
    assert len(b.recorder.losses)==len(b.recorder.lrs)==len(b.recorder.hps['lr'])==b.recorder.iters[-1]

@pytest.mark.parametrize('event', ['before_step','after_step'])
def test_at_a_step_the_learner_has_the_state_of_the_full_batch_run(event):
    "The state is progress, epoch and learning rates, and in `after_step` also the mean loss of the step"
    def state(l):
        res = l.pct_train,l.epoch,[o['lr'] for o in l.opt.hypers]
        return (*res,l.loss.item()) if event=='after_step' else res
    a,b = RecordAt(event, state),RecordAt(event, state)
    toy(16).fit_one_cycle(2, 0.1, cbs=a)
    toy(4).fit_one_cycle(2, 0.1, cbs=[b,GradientAccumulation(16)])
    assert len(b.values)==10 and deviation(a.values, b.values)<1e-6

def test_each_batch_ends_with_a_smoothed_loss():
    "Progress bars and loggers read the smoothed loss. The last batch of an epoch takes the last step"
    seen,learn = [],toy(4)
    steps = RecordAt('after_step', lambda l: seen.append(0))
    reads = RecordAt('after_batch', lambda l: seen.append(float(l.smooth_loss)), order=51)
    learn.fit(1, 0.05, cbs=[GradientAccumulation(16),steps,reads])
    assert seen.count(0)==5 and all(0<=o<10 for o in seen) and seen[-2:]==[0,float(learn.recorder.losses[-1])]

# With `log_accum_batch=False`, every micro-batch is recorded, as in fastai

def test_recording_every_micro_batch_does_not_change_the_weights():
    "Every micro-batch is recorded with the learning rate of its step"
    a,b = both_runs(acc=dict(log_accum_batch=False))
    rec = b.recorder
    assert deviation(weights(a), weights(b))<1e-12
    assert len(rec.losses)==len(rec.lrs)==len(rec.hps['lr'])==36 and list(rec.iters)==[18,36]
    lrs = [lr for i,lr in enumerate(a.recorder.lrs) for _ in range(2 if i%5==4 else 4)]
    assert deviation(rec.lrs, lrs)<1e-12

def test_the_recorded_losses_are_those_of_the_micro_batches():
    "With a learning rate of 0, all recorded values are those of a run without accumulation"
    def run(cbs, bs=4):
        learn = metered(bs, metrics=metrics(), n=64)
        learn.fit(2, 0., wd=0., cbs=cbs)
        return learn.recorder.losses,learn.recorder.values
    assert deviation(run([]), run(recording_each(16)))<1e-6
    assert deviation(run([]), run(recording_each(16, micro_batch_size=4), 16))<1e-6

def recording_each(n, **kwargs):
    "Return a callback with which the Recorder records each micro-batch"
    return GradientAccumulation(n, log_accum_batch=False, **kwargs)

@pytest.mark.parametrize('bs,n,cbs,want', [
    (16, 70, lambda: [recording_each(24, micro_batch_size=4)], 2*(4+2+2+4+4+2)),
    (4, 70, lambda: [recording_each(16, drop_last=True)], 2*16),
    (4, 48, lambda: [recording_each(16),RaiseAt('after_pred', CancelBatchException, 0, skip=1)], 2*12-1),
    # `lr_find` after the first epoch empties the records
    (4, 64, lambda: [recording_each(16),*within(run_lr_find)], 6+16),
    (4, 64, lambda: [RecordAt('before_epoch', lambda l: l.epoch==1 and l.add_cb(GradientAccumulation(16)))], 16+4)],
    ids=['split','dropped','cancelled','after a search','from the second epoch'])
def test_each_micro_batch_that_is_trained_on_is_recorded(bs, n, cbs, want):
    learn = toy(bs, n=n)
    learn.fit(2, 0.1, cbs=cbs())
    assert len(learn.recorder.losses)==want
