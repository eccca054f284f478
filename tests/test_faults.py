"""Whatever ends a fit, wherever: nothing is left behind.

Every training event x every way to end a fit x callback orders before and after each listener x several
micro-batches. After each, the other callbacks are as they were, a plain fit records every batch, and the next
accumulated fit is its twin's. Of the micro-batches, each event, order and way to end meets one or two, so that all
pairs of them meet; with FAULTS=all in the environment each meets all.
"""
import os
import pytest
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException,
    CancelFitException, CancelStepException, CancelTrainException, CancelValidException)
from fastcore.basics import noop
from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
from fastaccum import GradientAccumulation
from fastaccum.core.listeners import Listener, listeners
from fastaccum.testing import assert_twins, deviation, toy
from common import Raise

per_fit = ['before_fit','before_epoch','before_train','after_train','before_validate','after_validate',
    'after_epoch','after_fit']
per_batch = ['before_batch','after_pred','after_loss','before_backward','after_backward','before_step','after_step',
             'after_cancel_batch','after_batch']
excs = [KeyboardInterrupt,RuntimeError,CancelFitException,CancelEpochException,CancelTrainException]
orders = [-11,-9,5,7,49,51,59,61,100]   # around TrainEvalCallback (-10), us (6), Recorder (50), ParamScheduler (60)
n,micro,macro = 22,2,8                  # 11 micro-batches: 8, 8 and a remainder of 6 samples

class Mine(Callback):
    "A user's own listener"
    order = 55
    def before_fit(self): self.steps = []
    def after_batch(self):
        if self.training: self.steps.append(self.train_iter)

class Bar(Callback):
    "Where ShowGraphCallback draws"
    order,name,mbar = 60,'progress',None
    def before_fit(self): self.learn.progress.mbar = self
    def update_graph(self, *args): pass

@pytest.fixture(autouse=True)
def told(monkeypatch, tmp_path):
    monkeypatch.setitem(listeners, Mine, Listener)
    monkeypatch.chdir(tmp_path)   # where CSVLogger writes

def watchers(): return [CSVLogger(),Bar(),ShowGraphCallback(),Mine()]

def faulty_fit(learn, fault, acc, permanent, watchers=watchers):
    "Fit until `fault`; like a user who then takes the callback off, if it was `permanent`. Everybody listens"
    if permanent: learn.add_cb(acc)
    cbs = watchers()
    try: learn.fit_one_cycle(2, 0.1, cbs=cbs+([fault] if permanent else [acc,fault]))
    except BaseException:
        if not fault.raised: raise   # (some faults make fastai's own callbacks raise something else on the way out)
    if permanent: learn.remove_cb(acc)
    for cb in cbs: assert 'after_batch' not in vars(cb), f'{cb} was left changed'
    learn.logger = noop   # an interrupt leaves CSVLogger's and ProgressCallback's, also without accumulation

def check_clean(learn):
    "Nothing is left of accumulation"
    assert not {'all_batches','_step','one_batch','_call_one','_with_events'}&vars(learn).keys()
    for cb in learn.cbs:
        assert 'after_batch' not in vars(cb), f'{cb} still has our after_batch'
        assert cb.run and cb.run_train and cb.run_valid==type(cb).run_valid
    for p in learn.model.parameters(): assert p.grad is None or not p.grad.any(), 'gradients are left'

def check_plain(learn):
    "A plain fit records every batch, as in a Learner that never accumulated"
    fresh = toy(micro, n=n)
    fresh.model.load_state_dict(learn.model.state_dict())
    for o in (learn,fresh): o.fit_one_cycle(1, 0.01, reset_opt=True)
    assert len(learn.recorder.losses)==len(learn.recorder.lrs)==11 and learn.train_iter==11
    assert_twins(fresh, learn)

def check_accumulated(learn):
    "The next accumulated fit is the run on big batches from the same weights"
    big = toy(macro, n=n)
    big.model.load_state_dict(learn.model.state_dict())
    big.fit_one_cycle(1, 0.01, reset_opt=True)
    learn.fit_one_cycle(1, 0.01, reset_opt=True, cbs=GradientAccumulation(macro))
    assert_twins(big, learn)

@pytest.mark.parametrize('exc', excs, ids=lambda o: o.__name__)
@pytest.mark.parametrize('event', per_fit+per_batch)
def test_fault(event, exc):
    # how often the event came before: `before_fit` and `after_fit` come once
    raised,ats = 0,(0,1,3,4,10) if event in per_batch else (0,) if event.endswith('_fit') else (0,1)
    for i,order in enumerate(orders):
        turn = (i+excs.index(exc))%len(ats)
        for at in ats if os.environ.get('FAULTS')=='all' else (ats+ats)[turn:turn+(2 if event in per_batch else 1)]:
            learn = toy(micro, n=n)
            fault = Raise(event, exc, order, at)
            faulty_fit(learn, fault, GradientAccumulation(macro), permanent=(i+at)%2)
            check_clean(learn)
            for check in (check_plain,check_accumulated)[::1 if (i+at//2)%2 else -1]: check(learn)
            raised += fault.raised
    assert raised>=len(orders), f'{event} was reached {raised} times only'

@pytest.mark.parametrize('kwargs', [dict(drop_last=True), dict(log_accum_batch=False), dict(micro_batch_size='auto')],
    ids=str)
@pytest.mark.parametrize('exc', excs, ids=lambda o: o.__name__)
def test_fault_with_other_arguments(exc, kwargs):
    for event in ('after_train','after_backward','after_batch'):
        for order in orders:
            learn = toy(micro, n=n)
            faulty_fit(learn, Raise(event, exc, order, at=1), GradientAccumulation(macro, **kwargs), permanent=order%2)
            check_clean(learn)
            check_plain(learn)

@pytest.mark.parametrize('exc', excs, ids=lambda o: o.__name__)
def test_permanent_callback_survives_a_fault(exc):
    "A callback that stays on the Learner starts clean after a fault"
    for event in per_fit+per_batch:
        learn = toy(micro, n=n, cbs=GradientAccumulation(macro))
        try: learn.fit_one_cycle(1, 0.1, cbs=Raise(event, exc, order=61, at=0 if event in per_fit else 5))
        except BaseException: pass
        big = toy(macro, n=n)
        big.model.load_state_dict(learn.model.state_dict())
        for o in (big,learn): o.fit_one_cycle(1, 0.01, reset_opt=True)
        assert_twins(big, learn)

def test_validation_after_an_interrupt_is_stock():
    "Between an interrupt and the next fit, `validate` and `get_preds` work as ever"
    learn = toy(micro, n=n, cbs=GradientAccumulation(macro))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=Raise('after_backward', KeyboardInterrupt, 5, at=5))
    fresh = toy(micro, n=n)
    fresh.model.load_state_dict(learn.model.state_dict())
    assert list(learn.validate())==list(fresh.validate())
    assert deviation(learn.get_preds()[0], fresh.get_preds()[0])==0

@pytest.mark.parametrize('how', ['run','cbs','remove_cb'])
def test_plain_fit_after_an_interrupt_however_the_callback_was_turned_off(how):
    acc = GradientAccumulation(macro)
    learn = toy(micro, n=n, cbs=acc)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=Raise('after_batch', KeyboardInterrupt, 5, at=5))
    if how=='run': acc.run = False
    elif how=='cbs': learn.cbs = learn.cbs.filter(lambda o: o is not acc)
    else: learn.remove_cb(acc)
    learn.opt.zero_grad()
    check_plain(learn)

cancels = dict(after_cancel_backward=('before_backward',CancelBackwardException),
    after_cancel_step=('before_step',CancelStepException),
    after_cancel_batch=('after_loss',CancelBatchException), after_cancel_train=('after_batch',CancelTrainException),
    after_cancel_epoch=('after_batch',CancelEpochException),
    after_cancel_validate=('before_validate',CancelValidException),
    after_cancel_fit=('after_batch',CancelFitException))

@pytest.mark.parametrize('exc', excs, ids=lambda o: o.__name__)
@pytest.mark.parametrize('event', cancels)
def test_fault_while_something_is_cancelled(event, exc):
    "The events that only come when another callback cancels"
    at,cancel = cancels[event]
    for i,order in enumerate(orders):
        learn = toy(micro, n=n)
        learn.add_cb(Raise(at, cancel, 5, at=i%2))
        fault = Raise(event, exc, order)
        faulty_fit(learn, fault, GradientAccumulation(macro), permanent=i%2)
        assert fault.raised
        learn.remove_cbs(learn.cbs.filter(lambda o: isinstance(o, Raise)))
        check_clean(learn)
        for check in (check_plain,check_accumulated)[::1 if i%2 else -1]: check(learn)

# TensorBoard and Weights & Biases: a smaller grid

@pytest.fixture(scope='module')
def offline(tmp_path_factory):
    wandb = pytest.importorskip('wandb')
    yield wandb.init(mode='offline', dir=str(tmp_path_factory.mktemp('wandb')),
        settings=wandb.Settings(silent=True, console='off', x_disable_stats=True))
    wandb.finish()

@pytest.mark.parametrize('exc', excs, ids=lambda o: o.__name__)
def test_fault_while_logging(exc, offline, tmp_path, monkeypatch):
    pytest.importorskip('tensorboard')
    import wandb
    from fastai.callback.tensorboard import TensorBoardCallback
    from fastaccum.wandb import WandbCallback
    monkeypatch.setattr(WandbCallback.__mro__[1], '_wandb_watch_called', True)   # each model is watched below
    events = ('before_train','after_loss','after_backward','before_step','after_batch','after_epoch')
    def loggers():
        return [ProgressCallback(),ShowGraphCallback(),
                TensorBoardCallback(tmp_path, trace_model=False, log_preds=False),
                WandbCallback(log='all', log_preds=False),Mine()]
    for i,(event,order) in enumerate((e,o) for e in events for o in (5,52,100)):
        learn = toy(micro, n=n)
        wandb.watch(learn.model, log='all', log_freq=2)
        hooks = lambda: {k:h.hooks_dict_ref()[h.id] for k,h in offline._torch._hook_handles.items()}
        stock = hooks()
        faulty_fit(learn, Raise(event, exc, order, at=i%2 if event in per_fit else i%5),
            GradientAccumulation(macro), i%2, loggers)
        wrong = [k for k,v in hooks().items() if v is not stock[k]]
        assert len(stock)==7 and not wrong, f'{event} {order}: {wrong}'
        check_clean(learn)
        wandb.unwatch(learn.model)
        for check in (check_plain,check_accumulated)[::1 if i%2 else -1]: check(learn)
