"""fastai and torch still have the private or undocumented behavior on which fastaccum relies.

If a test fails with a new version of fastai or torch, adapt the part of fastaccum that relies on this
behavior.
"""
import inspect, torch
from functools import partial
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from fastai.callback.core import _inner_loop
from fastai.text.all import (Callback, DataLoader, GradientAccumulation as FastaiGradientAccumulation, GradientClip,
    LMDataLoader, LRFinder, Learner, MixedPrecision, OptimWrapper, ParamScheduler, Recorder, TrainEvalCallback)
from fastaccum.testing import toy
from common import RecordAt, grads

def test_fastai_runs_a_batch_with_this_source_code():
    """fastaccum's step loop runs a micro-batch and sends its events like these methods

    If a method changes, compare both.
    """
    def same(f, src): assert ' '.join(inspect.getsource(f).split())==' '.join(src.split())
    same(Learner.one_batch, """def one_batch(self, i, b): self.iter = i b = self._set_device(b) self._split(b)
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)""")
    same(Learner._do_one_batch, """def _do_one_batch(self): self.pred = self.model(*self.xb) self('after_pred')
        if len(self.yb): self.loss_grad = self.loss_func(self.pred, *self.yb) self.loss = self.loss_grad.clone()
        self('after_loss') if not self.training or not len(self.yb): return self._do_grad_opt()""")
    same(Learner._do_grad_opt, """def _do_grad_opt(self):
        self._with_events(self._backward, 'backward', CancelBackwardException)
        self._with_events(self._step, 'step', CancelStepException) self.opt.zero_grad()""")
    same(Learner._with_events, """def _with_events(self, f, event_type, ex, final=noop):
        try: self(f'before_{event_type}'); f() except ex: self(f'after_cancel_{event_type}')
        self(f'after_{event_type}'); final()""")
    same(Learner.all_batches, """def all_batches(self): self.n_iter = len(self.dl)
        for o in enumerate(self.dl): self.one_batch(*o)""")
    same(Learner._do_epoch_train, """def _do_epoch_train(self): self.dl = self.dls.train
        self._with_events(self.all_batches, 'train', CancelTrainException)""")
    same(Learner._backward, "def _backward(self): self.loss_grad.backward()")
    same(Learner._step, "def _step(self): self.opt.step()")
    assert "for cb in self.cbs.sorted('order'): cb(event_name)" in inspect.getsource(Learner._call_one)

def test_the_callbacks_of_fastai_have_these_orders():
    cbs = TrainEvalCallback,FastaiGradientAccumulation,MixedPrecision,GradientClip,Recorder,ParamScheduler
    assert [o.order for o in cbs]==[-10,6,10,11,50,60]

def test_a_callback_is_called_through_its_instance_unless_it_is_switched_off():
    "`run` and `run_valid` switch it off, an attribute replaces a method, `after_fit` sets `run` to True"
    class A(Callback):
        run_valid = False
        def after_loss(self): return 'class'
    cb,learn = A(),toy(4, n=4)
    learn.add_cb(cb)
    def result(training):
        learn.training = training
        return cb('after_loss')
    assert 'after_loss' in _inner_loop and (result(True),result(False))==('class',None)
    vars(cb)['after_loss'] = lambda: 'instance'
    assert result(True)=='instance'
    cb.run = False
    assert result(True) is None
    cb('after_fit')
    assert cb.run

def test_the_lock_of_the_learner_tells_validation_from_a_fit():
    """Validation and prediction also send `before_fit`

    They hold `learn.lock` meanwhile, and a fit does not.
    """
    locked = []
    class RecordsLock(Callback):
        def before_fit(self): locked.append(self.learn.lock.locked())
    learn = toy(4, n=8, cbs=RecordsLock())
    learn.validate()
    learn.get_preds()
    learn.fit(1)
    assert locked==[True,True,False]

def test_schedulers_and_the_finder_read_the_progress_that_fastai_counts_in_batches():
    """`train_iter` grows by 1 with each batch

    ParamScheduler reads `pct_train` in `before_batch`, LRFinder `train_iter`.
    """
    progress,positions = RecordAt('before_batch', lambda l: (l.train_iter, round(l.pct_train, 12))),[]
    toy(4, n=16).fit(2, cbs=[progress,ParamScheduler({'lr':lambda pos: positions.append(pos) or 0.1})])
    assert progress.values==[(i, i/8) for i in range(8)] and positions==[i/8 for i in range(8)]
    for o in ('self.train_iter/self.num_it','self.train_iter >= self.num_it','self.smooth_loss'):
        assert o in inspect.getsource(LRFinder)

def test_the_recorder_appends_rates_losses_and_metrics_after_each_batch():
    src = inspect.getsource(Recorder.after_batch)+inspect.getsource(Recorder._train_mets.fget)
    for o in ('self.lrs.append','self.losses.append','self.learn.smooth_loss','self.train_metrics'): assert o in src

def test_a_gradient_after_a_step_is_zero_with_fastais_optimizers_and_none_with_torchs():
    "After a fit, fastai's weight decay still changes a frozen body, because its gradients are zeros"
    a,b = toy(4, n=4),toy(4, n=4, opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    for o in (a,b): o.fit(1)
    assert all(g is not None for g in grads(a)) and all(g is None for g in grads(b))
    a.freeze()
    body = a.model[0].weight.clone()
    a.fit(1, 0.1, wd=0.1)
    assert not a.model[0].weight.equal(body)

def test_a_loader_can_be_copied_or_changed_to_another_batch_size():
    """`new` takes `bs` and `get_idxs`, and `bs` can be set

    A language model's loader makes chunks of a fixed size.
    """
    dl = DataLoader(list(range(10)), bs=4)
    assert [o.tolist() for o in dl.new(bs=3, get_idxs=lambda: [1,2,5])]==[[1,2,5]]
    dl.bs = 3
    assert [len(o) for o in dl]==[3,3,3,1]
    assert hasattr(LMDataLoader, 'make_chunks')

def test_torch_still_has_the_private_names_that_fastaccum_uses():
    """`_post_accumulate_grad_hooks` has the hooks of a parameter

    `tree_flatten` keeps the order of a structure's leaves.
    """
    p = nn.Parameter(torch.zeros(1))
    assert not p._post_accumulate_grad_hooks
    p.register_post_accumulate_grad_hook(lambda p: None)
    assert p._post_accumulate_grad_hooks
    for o in ([(p,1)], dict(a=p, b=[1]), (p,{'c':1})):
        leaves,spec = tree_flatten(o)
        assert leaves[0] is p and leaves[1]==1 and tree_unflatten(leaves, spec)==o
    assert inspect.getsource(torch.autocast.__exit__).count('autocast_decrement_nesting')==1
