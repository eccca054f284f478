"""Facts about fastai (and torch) that fastaccum relies on and that nobody promised.

If one of these fails, look there first."""
import inspect
import pytest, torch
from torch import nn
from fastai.callback.core import Callback, CancelBatchException, CancelStepException, TrainEvalCallback
from fastai.callback.core import _inner_loop, event
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import LRFinder, ParamScheduler
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation, GradientClip
from fastai.learner import Recorder
from fastai.losses import CrossEntropyLossFlat
from fastaccum import GradientAccumulation
from fastaccum.testing import toy
from common import Seen, grads, weights

def test_orders_of_fastai_callbacks():
    assert (TrainEvalCallback.order,FastaiGradientAccumulation.order,MixedPrecision.order,GradientClip.order,
        Recorder.order,ParamScheduler.order)==(-10,6,10,11,50,60)
    assert GradientAccumulation.order==6

def test_cancelling_a_batch_in_after_backward_skips_the_step_and_fires_after_batch():
    heard = []
    class Cancel(Callback):
        order = 6
        def after_backward(self): raise CancelBatchException
        def before_step(self): heard.append('before_step')
        def after_step(self): heard.append('after_step')
        def after_cancel_batch(self): heard.append('after_cancel_batch')
        def after_batch(self): heard.append('after_batch') if self.training else None
    learn = toy(4, n=4)
    before = weights(learn)
    learn.fit(1, 0.1, cbs=Cancel())
    assert heard==['after_cancel_batch','after_batch'] and weights(learn).equal(before)
    assert any(g.any() for g in grads(learn))

def test_an_instances_own_event_method_wins():
    "`Callback.__call__` looks the event up on the instance"
    class A(Callback):
        def after_batch(self): return 'class'
    cb = A()
    vars(cb)['after_batch'] = lambda: 'instance'
    assert cb('after_batch')=='instance'
    del vars(cb)['after_batch']
    assert cb('after_batch')=='class'

def test_callbacks_of_a_fit_are_taken_off_after_any_exception():
    "`added_cbs` removes them in a `finally`, and `remove_cb` sets `learn` to None"
    class Interrupt(Callback):
        def before_batch(self): raise KeyboardInterrupt
    learn,cb = toy(4),Interrupt()
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=cb)
    assert cb.learn is None and cb not in learn.cbs

def test_with_events_steps_outside_of_a_batch():
    "`learn._with_events(learn._step, 'step', …)` runs before_step, the step, after_step"
    learn,heard = toy(4, n=4),[]
    class Hear(Callback):
        def before_step(self): heard.append('before')
        def after_step(self): heard.append('after')
    learn.fit(1, 0., cbs=Hear())
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    learn.opt.set_hypers(lr=0.1)
    before = weights(learn)
    with learn.added_cbs(Hear()): learn._with_events(learn._step, 'step', CancelStepException)
    assert heard==['before','after']*2 and not weights(learn).equal(before)

def test_train_eval_callback_moves_progress_by_micro_batches():
    seen = Seen('before_batch', lambda l: (l.train_iter, round(l.pct_train, 12)))
    toy(4, n=16).fit(2, cbs=seen)
    assert seen.values==[(i, i/8) for i in range(8)]

def test_recorder_writes_in_after_batch_what_its_flags_allow():
    "`train_metrics` and `cancel_train` decide whether metrics and smoothed loss are fed"
    src = inspect.getsource(Recorder.after_batch)+inspect.getsource(Recorder._train_mets.fget)
    for o in ('self.lrs.append','self.losses.append','self.learn.smooth_loss','self.train_metrics',"'cancel_train'"):
        assert o in src

def test_lr_finder_reads_train_iter_and_num_it():
    src = inspect.getsource(LRFinder)
    assert 'self.train_iter/self.num_it' in src and 'self.train_iter >= self.num_it' in src
    assert 'self.smooth_loss' in src
    assert issubclass(LRFinder, ParamScheduler)

def test_n_epoch_can_be_set_in_before_fit():
    class More(Callback):
        def before_fit(self): self.learn.n_epoch = 3
    learn = toy(4, n=4)
    learn.fit(1, cbs=More())
    assert len(learn.recorder.values)==3

def test_param_scheduler_reads_pct_train_in_before_batch():
    asked = []
    learn = toy(4, n=16)
    learn.fit(1, cbs=ParamScheduler({'lr':lambda pos: asked.append(pos) or 0.1}))
    assert asked==[0,0.25,0.5,0.75]

def test_zero_gradients_still_decay_a_frozen_body():
    "fastai's `zero_grad` leaves zeros, and its optimizers step on them: why we do not turn them into None"
    learn = toy(4, n=16)
    learn.fit(1, 0.1)
    learn.freeze()
    body = learn.model[0].weight.clone()
    learn.fit(1, 0.1, wd=0.1)
    assert not learn.model[0].weight.equal(body)

def test_post_accumulate_grad_hooks_are_kept_on_the_parameter():
    p = nn.Parameter(torch.zeros(1))
    assert not p._post_accumulate_grad_hooks
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert p._post_accumulate_grad_hooks

def test_validation_holds_the_lock():
    "`validate` and `get_preds` fire `before_fit` too; the lock tells them from a fit"
    locked = []
    class Look(Callback):
        def before_fit(self): locked.append(self.learn.lock.locked())
    learn = toy(4, n=8, cbs=Look())
    learn.validate(); learn.get_preds(); learn.fit(1)
    assert locked==[True,True,False]

def test_foreach_mul_takes_numbers_and_tensors():
    ts = [torch.ones(2, dtype=torch.float64)]
    torch._foreach_mul_(ts, 3.)
    torch._foreach_mul_(ts, torch.tensor(1/7, dtype=torch.float64))
    assert abs(ts[0]-3/7).max()<1e-15

def test_flat_losses_cast_double_predictions_to_single():
    "Why `fastaccum.testing` has a cross-entropy of its own"
    assert CrossEntropyLossFlat()(torch.randn(2, 3, dtype=torch.float64), torch.tensor([0,1])).dtype==torch.float32

def test_smooth_loss_cannot_hold_double_precision():
    learn = toy(4, n=4)
    learn.remove_cb(learn.float32_loss)
    with pytest.raises(RuntimeError, match='dtype'): learn.fit(1)

def test_inner_loop_events_obey_run_valid():
    assert {'before_batch','before_backward','after_cancel_backward','after_backward','after_batch'}<=set(_inner_loop)
    assert 'after_train' not in _inner_loop

def test_what_the_logging_callbacks_are_written_like():
    "Names that `fastaccum.loggers` reads and sets; looked up in the source, so that the packages need not be there"
    from pathlib import Path
    import fastai
    src = {nm:(Path(fastai.__file__).parent/'callback'/f'{nm}.py').read_text() for nm in ('wandb','tensorboard')}
    for o in ('self.ti_batch = time.perf_counter()','self._wandb_epoch += 1/self.n_iter',
            'len(self.xb[0]) / batch_time','step=self._wandb_step'):
        assert o in src['wandb']
    assert "self.writer.add_scalar('train_loss', self.smooth_loss, self.train_iter)" in src['tensorboard']

def test_show_graph_reads_train_iter():
    "It draws validation points at `train_iter` beside a curve of `recorder.losses`: they meet because both count steps"
    from fastai.callback.progress import ShowGraphCallback
    src = inspect.getsource(ShowGraphCallback)
    assert 'self.nb_batches.append(self.train_iter)' in src and 'range_of(rec.losses)' in src

def test_the_hooks_of_wandb_watch(monkeypatch):
    "`run._torch_history._hook_handles` has the handles of what `wandb.watch` put on parameters and model"
    pytest.importorskip('wandb')
    from wandb.integration.torch.wandb_torch import TorchHistory
    from wandb.sdk.wandb_run import Run
    assert '_torch_history' in inspect.getsource(Run._torch.fget)
    model,history = torch.nn.Linear(2, 2),TorchHistory()
    history.add_log_gradients_hook(model)
    history.add_log_parameters_hook(model)
    refs = [h.hooks_dict_ref() for h in history._hook_handles.values()]
    assert [any(o is r for r in refs)
        for o in (model.weight._backward_hooks,model.bias._backward_hooks,model._forward_hooks)]==[True]*3
# What the batch size finder relies on

def test_autocast_state_can_be_left_by_hand():
    "What `torch.autocast.__exit__` does with global functions"
    src = inspect.getsource(torch.autocast.__exit__)
    for o in ('autocast_decrement_nesting','clear_autocast_cache','set_autocast_enabled','set_autocast_dtype',
            'set_autocast_cache_enabled'):
        assert o in src and hasattr(torch, o)

def test_a_callback_fails_over_an_error_without_a_message():
    "`is_out_of_memory` looks behind the IndexError"
    class A(Callback):
        def before_fit(self): raise MemoryError
    with pytest.raises(IndexError) as info: A()('before_fit')
    assert type(info.value.__context__) is MemoryError

def test_a_cancelled_step_fires_after_step_too():
    heard = []
    class Cancel(Callback):
        def before_step(self): raise CancelStepException
        def after_cancel_step(self): heard.append('cancel')
        def after_step(self): heard.append('after')
    toy(4, n=4).fit(1, cbs=Cancel())
    assert heard==['cancel','after']

def test_torch_optimizers_free_gradients_and_fastais_keep_them():
    "Why the finder holds them"
    from functools import partial
    from fastai.optimizer import OptimWrapper
    a,b = toy(4, n=4),toy(4, n=4, opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    for o in (a,b): o.fit(1)
    assert all(g is not None for g in grads(a)) and all(g is None for g in grads(b))

def test_names_of_the_callbacks_that_the_finder_leaves_out():
    from fastai.callback.training import ShortEpochCallback
    from fastai.callback.tracker import TerminateOnNaNCallback
    from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
    from fastai.callback.tracker import TrackerCallback
    from fastai.distributed import DistributedTrainer
    from fastaccum.memory.trials import _out
    assert {f'{o.__module__}.{o.__qualname__}' for o in (GradientAccumulation,FastaiGradientAccumulation,
        ShortEpochCallback,TerminateOnNaNCallback,DistributedTrainer)}==_out
    assert all(o.order>=Recorder.order
        for o in (CSVLogger,ProgressCallback,ShowGraphCallback,TrackerCallback,ParamScheduler))

def test_loaders_of_another_size():
    "`new` takes `bs` and `get_idxs`; the batch size of a loader can be set, but a language model loader's is built in"
    from fastai.data.load import DataLoader
    from fastai.text.data import LMDataLoader, SortedDL
    dl = DataLoader(list(range(10)), bs=4)
    assert [o.tolist() for o in dl.new(bs=3, get_idxs=lambda: [1,2,5])]==[[1,2,5]]
    dl.bs = 3
    assert [len(o) for o in dl]==[3,3,3,1]
    assert hasattr(LMDataLoader, 'make_chunks')
    assert vars(SortedDL([(torch.ones(n),) for n in (2,5)], bs=1, num_workers=0))['res']==[2,5]

def test_learner_attributes_that_a_search_puts_back_are_in_its_dict():
    learn = toy(4, n=8)
    assert {'dls','model','loss_func','opt','cbs','logger','training','n_epoch','recorder'}<=vars(learn).keys()
    assert isinstance(learn.cbs.items, list)
    assert isinstance(vars(learn.dls)['loaders'], list)

# What the dispatch of events relies on

def test_a_learner_asks_its_instance_for_call_one():
    learn,called = toy(4, n=8),[]
    learn._call_one = called.append
    learn('before_batch')
    assert called==['before_batch']

def test_with_events_asks_the_learner_for_nothing_but_to_be_called():
    "So that another object can take the Learner's place in it"
    from fastai.learner import Learner
    assert Learner._with_events.__code__.co_names==()

def test_call_one_calls_each_callback_in_order_and_nothing_else():
    from fastai.learner import Learner
    assert set(Learner._call_one.__code__.co_names)=={'hasattr','event','Exception','cbs','sorted'}
    assert all(hasattr(event, o) for o in _inner_loop)

def test_only_after_fit_does_something_to_a_callback_without_a_method():
    src = inspect.getsource(Callback.__call__)
    assert src.count('event_name==')==1 and "if event_name=='after_fit': self.run=True" in src
    assert 'getcallable(self, event_name)()' in src
    class Deaf(Callback): pass
    cb = Deaf()
    cb.learn = toy(4, n=8)
    before = dict(vars(cb))
    assert [cb(o) for o in _inner_loop]==[None]*len(_inner_loop) and vars(cb)==before

def test_a_missing_method_is_looked_up_in_the_learner_and_then_in_the_model():
    class Deaf(Callback): pass
    learn,cb = toy(4, n=8),Deaf()
    learn.add_cb(cb)
    assert (Callback._default,type(learn)._default)==('learn','model') and vars(cb)['learn'] is learn
    learn.model.after_loss = lambda: 'model'
    assert cb('after_loss')=='model'
    learn.after_loss = lambda: 'learner'
    assert cb('after_loss')=='learner'

def test_callbacks_are_kept_in_an_l_whose_items_are_sorted_as_a_list_is():
    from fastcore.foundation import L
    learn = toy(4, n=8)
    assert type(learn.cbs) is L and type(learn.cbs.items) is list
    assert list(learn.cbs.sorted('order'))==sorted(learn.cbs.items, key=lambda o: getattr(o, 'order', 0))

# What the recovery from exhausted memory relies on, and the exchange between processes

def test_the_pytree_of_what_a_model_keeps():
    "`torch.utils._pytree` is private: leaves in order, a structure to compare, the way back; other objects are leaves"
    from collections import OrderedDict, namedtuple
    from torch.utils._pytree import tree_flatten, tree_unflatten
    class Box: pass
    x,y,Pair = torch.ones(2),torch.zeros(3),namedtuple('Pair', 'a b')
    for o in ([(x,y)], {'a':x,'b':[y]}, Pair(x, y), OrderedDict(a=x, b=y), (x,{'c':y})):
        leaves,spec = tree_flatten(o)
        assert [id(a) for a in leaves]==[id(x),id(y)] and not spec.is_leaf()
        back = tree_unflatten([1,2], spec)
        assert type(back) is type(o) and tree_flatten(back)==([1,2],spec)
    for o in (x,3,None,Box(),'text'):
        leaves,spec = tree_flatten(o)
        assert len(leaves)==1 and leaves[0] is o and spec.is_leaf() and tree_unflatten(leaves, spec) is o
    specs = [tree_flatten(o)[1] for o in ([x],[x,y],(x,),{'a':x},{'b':x},x)]
    assert all((a==b)==(i==j) for i,a in enumerate(specs) for j,b in enumerate(specs))

def test_one_batch_and_step_are_looked_up_on_the_learners_instance():
    learn,called = toy(4, n=4),[]
    stock = learn.one_batch,learn._step
    learn.one_batch = lambda *args: called.append('one_batch') or stock[0](*args)
    learn._step = lambda: called.append('step') or stock[1]()
    learn.fit(1, 0.1)
    assert called[:2]==['one_batch','step']

def test_running_statistics_change_without_a_new_version():
    "Why `Buffers` copies them each time; other changes in place count up"
    m = nn.BatchNorm1d(2)
    mean,version,tracked = m.running_mean.clone(),m.running_mean._version,m.num_batches_tracked._version
    m(torch.randn(4, 2))
    assert not m.running_mean.equal(mean) and m.running_mean._version==version
    assert m.num_batches_tracked._version==tracked+1

def test_ddp_exchanges_in_a_pass_that_needs_no_forward(tmp_path):
    "`_pre_forward` and `_post_forward` around any graph of the parameters; the next pass is as usual"
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    if not (dist.is_available() and dist.is_gloo_available()): pytest.skip('no gloo')
    assert [*inspect.signature(DDP._pre_forward).parameters]==['self','inputs','kwargs']
    assert [*inspect.signature(DDP._post_forward).parameters]==['self','output']
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    try:
        ddp,x,exchanged = DDP(nn.Linear(2, 1)),torch.ones(1, 2),[]
        def hook(state, bucket):
            exchanged.append(bucket.buffer().clone())
            fut = torch.futures.Future()
            fut.set_result(bucket.buffer())
            return fut
        ddp.register_comm_hook(None, hook)
        with ddp.no_sync(): ddp(x).sum().backward()
        grad = ddp.module.weight.grad.clone()
        assert not exchanged
        ddp._pre_forward()
        outs = ddp._post_forward([p.view_as(p) for p in ddp.parameters()])
        torch.autograd.backward(outs, [torch.zeros_like(o) for o in outs])
        assert [o.sum() for o in exchanged]==[3] and ddp.module.weight.grad.equal(grad)
        ddp(x).sum().backward()
        assert len(exchanged)==2 and ddp.module.weight.grad.equal(2*grad)
    finally: dist.destroy_process_group()
