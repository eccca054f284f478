"""However a fit ends, it leaves nothing behind that changes later fits.

The Learner, its callbacks and its model have their former state. A later fit without accumulation is
fastai's, and a later fit that accumulates is the full-batch run.
"""
import fastaccum, os, pytest, sys, torch
from itertools import product
from random import Random
from torch import nn
from unittest.mock import patch
from fastai.vision.all import Callback, CancelEpochException, CancelFitException, CancelTrainException, Learner
from fastcore.basics import noop
from fastaccum import (ActivationCheckpoint, GradientAccumulation, GradientAccumulationSchedule,
    GradientAccumulationScheduler, GradientCache, NoiseScale, ScaledLR)
from fastaccum.restore.state import autocast_state
from fastaccum.testing import assert_same_run, deviation, toy
from common import RaiseAt, pick_cases
from test_split import accumulating

n,micro,accum = 22,2,8   # an epoch has steps of 8, 8 and 6 samples

# for each event, how often it may pass before a callback raises the exception that ends the fit
n_passes = {nm:at for nms,at in {'before_fit after_fit':(0,),
    'after_backward before_step after_step after_batch':(0,1,2,3),
    'before_epoch before_train after_train before_validate after_validate after_epoch':(0,1),
    'before_batch after_pred after_loss before_backward':(0,1,3,10,13)}.items() for nm in nms.split()}
excs = [KeyboardInterrupt,RuntimeError,CancelFitException,CancelEpochException,CancelTrainException]
orders = [-11,5,7,49,51,59,100]   # before, between and after the callbacks of fastai and fastaccum
ways = dict(plain=lambda: [GradientAccumulation(accum)],
    dropping=lambda: [GradientAccumulation(accum, drop_last=True)],
    each=lambda: [GradientAccumulation(accum, log_accum_batch=False)],
    split=lambda: [GradientAccumulation(accum, micro_batch_size=1)],
    auto=lambda: accumulating(accum, ('auto',1)),   # memory holds a single sample
    schedule=lambda: [GradientAccumulationSchedule(4, accum)],
    scheduler=lambda: [GradientAccumulationScheduler({0:2, 1:4})],
    cached=lambda: [GradientAccumulation(accum), GradientCache(micro_batch_size=1)],
    cached_alone=lambda: [GradientCache(micro_batch_size='auto')],
    checkpointed_alone=lambda: [ActivationCheckpoint(nn.Linear)],
    noise=lambda: [GradientAccumulation(accum), NoiseScale(every=1), ScaledLR(base_bs=micro, rule='sqrt')])

def state(learn):
    """Return all state that a fit must restore

    It consists of methods and flags of the Learner, its callbacks, model, optimizer, loss function and
    loaders, and of their classes; of hooks; and of the modes of torch.
    """
    ms,classes = list(learn.model.modules()),[Learner,Callback,nn.Module,*map(type, learn.cbs)]
    # after an interrupt, fastai itself leaves these changed
    fastais = 'training','cancel_train','cancel_valid'
    own = {(o,nm):v for o in (learn,*learn.cbs,*ms,learn.opt,learn.loss_func,*learn.dls.loaders,*classes)
        for nm,v in vars(o).items() if callable(v) or type(v) is bool and nm not in fastais}
    hooks = {(o,nm):len(getattr(o, nm) or ()) for o in (*ms,*learn.model.parameters())
        for nm in {*vars(o),'_backward_hooks','_post_accumulate_grad_hooks'} if nm[-6:]=='_hooks' and hasattr(o, nm)}
    return own|hooks|dict(grad=torch.is_grad_enabled(), autocast=torch.is_autocast_enabled('cpu'), cbs=[*learn.cbs],
        names=vars(learn).keys()-{'lr_finder'}, dls=learn.dls, orders=[o.order for o in learn.cbs])

def learner():
    """Return a Learner that was fitted before

    `forward` is an attribute of its model, as after accelerate's `prepare`.
    """
    learn = toy(micro, n=n)
    learn.model.forward = learn.model.forward
    learn.fit(1, 0.)
    return learn

def assert_next_fit_is_right(learn, bs, *cbs):
    "Fail if the next fit differs from that of a new Learner with the same weights and batches of `bs`"
    fresh = toy(bs, n=n)
    fresh.model.load_state_dict(learn.model.state_dict())
    fresh.fit_one_cycle(1, 0.01)
    learn.fit_one_cycle(1, 0.01, reset_opt=True, cbs=cbs)
    assert len(learn.recorder.losses)==len(learn.recorder.lrs)==-(-n//bs)
    assert_same_run(fresh, learn)

def assert_nothing_left(learn, before, order=1):
    """Fail if the state differs from `before`, or if one of two later fits is wrong

    The first of the two does not accumulate and the second does; with `order=-1`, the order is reversed.
    """
    assert state(learn)==before
    for bs,cbs in ((micro,[]),(accum,[GradientAccumulation(accum)]))[::order]: assert_next_fit_is_right(learn, bs, *cbs)

rng = Random(0)
grid = [(event,*o, rng.choice([*ways]), rng.random()<.5) for event in n_passes
    for o in product(n_passes[event], excs, orders)]

@pytest.mark.parametrize('event,at,exc,order,way,stays', pick_cases(60, grid))
def test_whatever_ends_a_fit_it_leaves_nothing_behind(event, at, exc, order, way, stays):
    "The callbacks are passed to the fit, or with `stays`, they are on the Learner"
    learn,fault,cbs = learner(),RaiseAt(event, exc, order, at),ways[way]()
    before = state(learn)
    if stays: learn.add_cbs(cbs)
    try: learn.fit_one_cycle(2, 0.1, cbs=[fault, *([] if stays else cbs)])
    except BaseException:
        if not fault.raised: raise   # after the exception, fastai's callbacks may raise another one
    learn.remove_cbs(cbs if stays else [])
    learn.logger = noop   # fastai itself leaves another logger after an interrupt
    if 'alone' in way: learn.opt.zero_grad()   # fastai itself leaves gradients after an interrupt
    assert fault.raised and not any(p.grad is not None and p.grad.any() for p in learn.model.parameters())
    assert_nothing_left(learn, before, 1 if stays else -1)

@pytest.mark.parametrize('at', range(5))
@pytest.mark.parametrize('how', ['run','remove_cb','stays'])
def test_after_an_interrupt_validation_and_a_plain_fit_are_unaffected(how, at):
    "The callback is switched off, removed, or stays on the Learner, where it must not affect validation"
    learn,acc = learner(),GradientAccumulation(accum)
    learn.add_cb(acc)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=RaiseAt('after_pred', KeyboardInterrupt, 5, at))
    if how=='run': acc.run = False
    elif how=='remove_cb': learn.remove_cb(acc)
    fresh = toy(micro, n=n)
    fresh.model.load_state_dict(learn.model.state_dict())
    assert list(learn.validate())==list(fresh.validate())
    assert deviation(learn.get_preds()[0], fresh.get_preds()[0])==0
    if how=='run': acc.run = False   # fastai switches each callback on again when a fit ends
    learn.opt.zero_grad()
    assert_next_fit_is_right(learn, accum if how=='stays' else micro)

@pytest.mark.parametrize('way', ways)
def test_the_learning_rate_finder_leaves_nothing_behind(way):
    "`lr_find` cancels its fit in the middle of an epoch"
    learn = learner()
    before = state(learn)
    with learn.added_cbs(ways[way]()): learn.lr_find(num_it=5, show_plot=False)
    assert_nothing_left(learn, before)

def test_an_interrupt_within_the_recorder_leaves_nothing_behind():
    learn = learner()
    learn.recorder.train_metrics = True
    interrupt = patch.object(learn.recorder.smooth_loss, 'accumulate', side_effect=KeyboardInterrupt)
    before = state(learn)
    with interrupt, pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=GradientAccumulation(accum))
    assert state(learn)==before
    learn.recorder.train_metrics = False
    assert_next_fit_is_right(learn, micro)

package = os.path.join(os.path.dirname(fastaccum.__file__), '')   # this path ends with a separator

def interrupted(at, way, stays, functions=None):
    """Interrupt a fit at bytecode number `at` in the code of fastaccum, or in its `functions`

    Return the Learner, and how many bytecodes ran.
    """
    learn,cbs,ran,old = learner(),ways[way](),0,sys.gettrace()
    def local(frame, event, arg):
        nonlocal ran
        ran += event=='opcode'
        if event!='opcode' or ran-1!=at: return local
        raise KeyboardInterrupt
    def trace(frame, event, arg):
        is_ours = frame.f_code.co_filename.startswith(package)
        frame.f_trace_opcodes = is_ours and (functions is None or frame.f_code.co_name in functions)
        if frame.f_trace_opcodes: return local
    if stays: learn.add_cbs(cbs)
    # Python 3.12 sends bytecodes only if a frame asks for them before `settrace` is called
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try: learn.fit_one_cycle(1, 0.1, cbs=[] if stays else cbs)
    except KeyboardInterrupt: pass
    finally: sys.settrace(old)
    # after an interrupt, fastai leaves its ParamScheduler on the Learner
    learn.remove_cbs([o for o in learn.cbs if o in cbs or type(o).__name__=='ParamScheduler'])
    return learn,ran

@pytest.mark.parametrize('stays', [False,True])
@pytest.mark.parametrize('way', pick_cases(5, ways))
def test_an_interrupt_anywhere_in_our_code_leaves_no_trace_in_later_fits(way, stays):
    total = interrupted(None, way, stays)[1]
    for at in pick_cases(3, Random(way).sample(range(total), 12)):
        learn,ran = interrupted(at, way, stays)
        assert ran==at+1
        if 'alone' in way: learn.opt.zero_grad()   # fastai itself leaves gradients after an interrupt
        for bs,cbs in ((micro,[]),(accum,[GradientAccumulation(accum)])): assert_next_fit_is_right(learn, bs, *cbs)

def test_an_interrupt_while_a_segment_is_restored_leaves_no_autocast_behind():
    """Later fits would use weights that autocast has cast before their last update

    The number of nested autocast contexts is 0 after a fit.
    """
    functions = '_put','set_rng_state','set_autocast_state'
    total = interrupted(None, 'checkpointed_alone', False, functions)[1]
    for at in range(total//2, total, max(1, total//60)):   # backward passes run a segment again
        interrupted(at, 'checkpointed_alone', False, functions)
        assert autocast_state()[0]==0, at

def interrupted_at_end_of_loader(at):
    "Like `interrupted`, but count only bytecodes of functions that run when the loader ends"
    learn,ran,functions = learner(),0,('__iter__','end','undo','pause_sync')
    def local(frame, event, arg):
        nonlocal ran
        if event!='opcode' or not learn.recorder.losses: return local
        ran += 1
        if ran-1==at: raise KeyboardInterrupt
        return local
    def trace(frame, event, arg):
        ends_the_loader = frame.f_code.co_name in functions and frame.f_code.co_filename.startswith(package)
        frame.f_trace_opcodes = ends_the_loader
        return local if ends_the_loader else None
    old = sys.gettrace()
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try: learn.fit(1, 0.1, cbs=GradientAccumulation(accum))
    except KeyboardInterrupt: pass
    finally: sys.settrace(old)
    return learn,ran

def test_an_interrupt_at_the_end_of_an_epoch_restores_the_learners_one_batch():
    total = interrupted_at_end_of_loader(None)[1]
    assert total>20
    for at in pick_cases(40, range(total)):
        learn,_ = interrupted_at_end_of_loader(at)
        assert 'one_batch' not in vars(learn), f'left behind by an interrupt at bytecode {at} of {total}'
