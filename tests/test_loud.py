"""Right or loud: what callbacks, losses and loaders of real applications do to a fit, each against its twin."""
import pickle, pytest, torch
from torch import nn
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelStepException,
    CancelTrainException)
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import GradientClip
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.testing import CrossEntropy, assert_twins, deviation, toy, toy_data, twins
from common import Seen, grads, weights

def params(m): return [list(m.parameters())]
def fit(l, cbs, n=2): l.fit(n, 0.05, cbs=cbs)

# The loss function changes while training

class Reweight(Callback):
    "Deferred re-weighting: from the second epoch on, classes have a weight"
    def before_fit(self): self.epochs = 0
    def before_epoch(self):
        if self.epochs: self.change(self.learn.loss_func)
        self.epochs += 1

changes = dict(weight=lambda f: setattr(f, 'weight', torch.tensor([0.2,1.,5.]).double()),
    in_place=lambda f: f.weight.mul_(torch.tensor([3.,1.,0.1])),
    reduction=lambda f: setattr(f, 'reduction', 'sum'), ignore_index=lambda f: setattr(f, 'ignore_index', 1))

@pytest.mark.parametrize('change', changes)
def test_loss_settings_that_change_in_mid_fit(change):
    def make(*args, **kwargs):
        return toy(*args, loss_func=CrossEntropy(weight=torch.ones(3).double() if change=='in_place' else None),
            **kwargs)
    def cbs():
        cb = Reweight()
        cb.change = changes[change]
        return [cb]
    a,b = twins(n=70, make=make, cbs=cbs, tokens=change!='ignore_index', fit=lambda l,cbs: l.fit(3, 0.01, cbs=cbs))
    assert_twins(a, b)

def test_a_reduction_that_changes_within_a_macro_batch_is_refused():
    learn = toy(4, n=64)
    class Change(Callback):
        def before_batch(self): self.learn.loss_func.reduction = 'sum' if self.iter==2 else 'mean'
    before = weights(learn)
    with pytest.raises(RuntimeError, match='in the middle of a macro-batch'):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16),Change()])
    assert weights(learn).equal(before)

@pytest.mark.parametrize('mix', [MixUp,CutMix])
@pytest.mark.parametrize('reduction', ['mean','sum'])
def test_mixing_callbacks(mix, reduction):
    """What is mixed is the same here (each sample with itself, rotated by a number of rows that divides all
    batches): so the means must be too"""
    class Mix(mix):
        def before_batch(self):
            self.yb1 = tuple(y.roll(1) if len(y)==1 else y.view(-1, 2).flip(1).flatten() for y in self.yb)
            self.lam = torch.tensor(0.3).double()
    def make(*args, **kwargs):
        class Loss(CrossEntropy): y_int = True
        return toy(*args, loss_func=Loss(reduction=reduction), **kwargs)
    a,b = twins(n=64, make=make, cbs=lambda: [Mix()], fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs))
    assert_twins(a, b)
    assert type(a.loss_func).__name__=='Loss'

@pytest.mark.parametrize('n', [64,70])
def test_a_loss_that_a_callback_averages(n):
    "`reduction='none'`, and the mean in `after_loss`"
    class Mean(Callback):
        order,run_valid = -101,False
        def after_loss(self): self.learn.loss_grad = self.loss_grad.mean()
    a,b = twins(n=n, loss_func=CrossEntropy(reduction='none'), cbs=lambda: [Mean()], fit=fit)
    # (fastai's mean over the validation set is another)
    for o in (a,b): o.recorder.values = [v[:1] for v in o.recorder.values]
    assert_twins(a, b)

class Penalty(Callback):
    "Added to the loss: of the weights, or of the predictions, in place or not"
    run_valid = False
    def __init__(self, of='weights', in_place=True): self.of,self.in_place = of,in_place
    def after_loss(self):
        pen = self.pred.pow(2).mean() if self.of=='preds' else sum(p.pow(2).sum() for p in self.model.parameters())
        if self.in_place: self.learn.loss_grad += pen
        else: self.learn.loss_grad = self.loss_grad+2*pen-pen

@pytest.mark.parametrize('of', ['weights','preds'])
@pytest.mark.parametrize('in_place', [True,False])
@pytest.mark.parametrize('n', [64,70])
def test_a_sum_with_a_penalty(of, in_place, n):
    with pytest.warns(UserWarning, match="sums .`reduction='sum'`.*a callback adds") as told:
        a,b = twins(n=n, loss_func=CrossEntropy(reduction='sum'), cbs=lambda: [Penalty(of, in_place)],
            fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs))
    assert len([o for o in told if 'reduction' in str(o.message)])==1
    assert_twins(a, b)

def test_a_sum_with_a_penalty_where_the_first_callback_is_for_validation():
    class First(Callback): order,run_train = -200,False
    with pytest.warns(UserWarning, match='a callback adds'):
        a,b = twins(n=70, loss_func=CrossEntropy(reduction='sum'), cbs=lambda: [First(),Penalty()],
            fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs))
    assert_twins(a, b)

def test_a_sum_that_a_callback_multiplies_says_so():
    class Twice(Callback):
        run_valid = False
        def after_loss(self): self.learn.loss_grad = self.loss_grad*2
    learn = toy(4, n=64, loss_func=CrossEntropy(reduction='sum'))
    with pytest.warns(UserWarning, match='scales the loss, do that in the loss function'):
        learn.fit(1, 1e-3, cbs=[GradientAccumulation(16),Twice()])

class Adds(Callback):
    "A penalty, in other ways than `+=`"
    run_valid = False
    def __init__(self, how, order=0): self.how,self.order = how,order
    def after_loss(self):
        l,pen = self.loss_grad,sum(p.pow(2).sum() for p in self.model.parameters())
        if self.how=='float': l = l.float()+pen.float()
        elif self.how=='stack': l = torch.stack([l,pen]).sum()
        elif self.how=='alpha': l = torch.add(l, pen, alpha=2)
        else:
            for _ in range(600): l = l+pen/600
        self.learn.loss_grad = l

@pytest.mark.parametrize('how,order', [('float',0), ('stack',0), ('alpha',0), ('each',0), ('each',-20)])
def test_a_sum_with_a_penalty_however_it_is_added(how, order):
    def fit(l, cbs): l.fit(2, 1e-3, cbs=cbs)
    with pytest.warns(UserWarning, match='a callback adds'):
        a,b = twins(n=70, loss_func=CrossEntropy(reduction='sum'), cbs=lambda: [Adds(how, order)], fit=fit)
    assert_twins(a, b, tol=1e-5 if how=='float' else 1e-7)

def test_a_loss_that_becomes_a_sum_with_a_penalty():
    class Sum(Callback):
        order = -20
        def before_epoch(self):
            if self.epoch==1: self.learn.loss_func.reduction = 'sum'
    def make(*args, **kwargs): return toy(*args, loss_func=CrossEntropy(), **kwargs)
    with pytest.warns(UserWarning, match='a callback adds'):
        a,b = twins(n=64, make=make, cbs=lambda: [Sum(),Penalty()], fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs))
    assert_twins(a, b)

@pytest.mark.parametrize('order', [0,7,50])
@pytest.mark.parametrize('tokens', [False,True])
def test_a_penalty_that_is_added_before_the_backward_pass(order, tokens):
    class Late(Callback):
        def before_backward(self):
            self.learn.loss_grad = self.loss_grad+sum(p.pow(2).sum() for p in self.model.parameters())
    def cbs():
        cb = Late()
        cb.order = order
        return [cb]
    assert_twins(*twins(n=70, tokens=tokens, cbs=cbs, fit=fit))

# Fits within fits

class Nested(Callback):
    "Another fit, or `lr_find`, between the epochs of this one"
    order = 70
    def __init__(self, event, what):
        self.what,self.inside = what,False
        setattr(self, event, self.nest)
    def nest(self):
        if self.inside: return
        self.inside = True
        if self.what=='fit': self.learn.fit(1, 0.02)
        else: self.learn.lr_find(num_it=8, show_plot=False)
        self.inside = False

@pytest.mark.parametrize('event', ['before_epoch','after_epoch'])
@pytest.mark.parametrize('what', ['fit','lr_find'])
def test_a_fit_between_the_epochs_of_another(event, what):
    steps = []
    def run(bs, acc):
        learn,seen = toy(bs, n=72, opt_func=SGD),Seen('after_step', lambda l: l.loss.item())
        if acc: learn.add_cb(acc)
        learn.add_cb(seen)
        learn.fit(3, 0.05, cbs=Nested(event, what))
        steps.append(len(seen.values))
        return learn
    a,b = run(12, None),run(4, GradientAccumulation(12))
    assert steps[0]==steps[1] and deviation(weights(a), weights(b))<1e-7

@pytest.mark.parametrize('event', ['before_batch','after_batch'])
def test_a_callback_that_is_added_in_the_middle_of_an_epoch(event):
    learn = toy(4, n=64)
    class Add(Callback):
        def add(self):
            if self.training and self.iter==2: self.learn.add_cb(GradientAccumulation(16))
    cb = Add()
    setattr(cb, event, cb.add)
    with pytest.raises(RuntimeError, match='GradientAccumulation cannot begin in the middle of an epoch. Add it'):
        learn.fit(1, 0.1, cbs=cb)

def test_a_callback_that_is_added_between_epochs():
    def run(bs, acc):
        learn = toy(bs, n=64)
        class Add(Callback):
            def after_epoch(self):
                if acc and not self.epoch: self.learn.add_cb(acc)
                elif not acc and not self.epoch: self.learn.dls.loaders[0] = toy(16, n=64).dls.train
        learn.fit(3, 0.1, cbs=Add())
        return learn
    a,b = run(4, None),run(4, GradientAccumulation(16))
    assert deviation(weights(a), weights(b))<1e-7 and len(a.recorder.losses)==len(b.recorder.losses)

@pytest.mark.parametrize('what', ['fit','lr_find'])
def test_schedules_after_a_fit_between_epochs(what):
    "By epochs they go on; as a fraction of training, fastai's `n_epoch` is not what it was, and you are told"
    class Once(Nested):
        done = False
        def nest(self):
            if self.done: return
            self.done = True
            super().nest()
    learn,seen = toy(4, n=64),Seen('before_step', lambda l: l.gradient_accumulation.macro.samples)
    learn.add_cb(GradientAccumulationScheduler({0:1, 2:4}))
    with pytest.warns(UserWarning, match='put `learn.n_epoch` back'):
        learn.fit(4, 0.02, cbs=[Once('after_epoch', what),seen])
    assert seen.values[-8:]==[16]*8

# Who else handles gradients

class Tied(nn.Module):
    "Encoder and decoder share a weight"
    def __init__(self):
        super().__init__()
        self.enc,self.mid,self.dec = nn.Linear(5,3),nn.Linear(3,5),nn.Linear(5,3)
        self.dec.weight = self.enc.weight
    def forward(self, x): return self.dec(self.mid(self.enc(x).tanh()).tanh())

@pytest.mark.parametrize('n', [64,70])
def test_tied_weights_in_two_groups_with_padded_tokens(n):
    a,b = twins(n=n, tokens=True, model=lambda: Tied().double(),
                splitter=lambda m: [list(m.enc.parameters()),[*m.mid.parameters(),*m.dec.parameters()]],
                opt_func=SGD, fit=fit)
    assert_twins(a, b)

@pytest.mark.parametrize('clip', [False,True])
def test_parameters_outside_of_the_optimizer(clip):
    "Their gradients add up over steps, since nobody empties them, and `GradientClip` counts them"
    a,b = twins(n=70, tokens=True, splitter=lambda m: [list(m[2:].parameters())],
        cbs=lambda: [GradientClip(0.5)] if clip else [], fit=fit)
    assert a.model[0].weight.grad.abs().sum()>0
    assert_twins(a, b)

@pytest.mark.parametrize('steps,micro', [(0,2), (1,6), (1,4)])
def test_gradients_outside_of_the_optimizer_after_a_cancelled_epoch(steps, micro):
    "The epoch ends after so many steps; of the micro-batches that follow the last of them nothing is left"
    def run(bs, cbs, n):
        class Stop(Callback):
            order,run_valid = -50,False
            def before_batch(self):
                if self.epoch==0 and self.iter==n: raise CancelEpochException
        learn = toy(bs, n=64, splitter=lambda m: [list(m[2:].parameters())])
        learn.fit(2, 0.05, cbs=[*cbs,Stop()])
        return learn
    a,b = run(16, [], steps),run(4, [GradientAccumulation(16)], micro)
    assert deviation(weights(a), weights(b))<1e-7
    assert deviation(grads(a), grads(b))<1e-7 and a.model[0].weight.grad.any()

@pytest.mark.parametrize('tokens', [False,True])
@pytest.mark.parametrize('event,exc', [('before_step',CancelBatchException), ('after_step',CancelBatchException),
    ('before_step',CancelStepException)])
def test_a_step_that_is_cancelled(event, exc, tokens):
    "With `CancelBatchException` nobody empties the gradients: the next step has them too, in both runs"
    class Cancel(Callback):
        order,run_valid = 20,False
        def before_fit(self): self.n = 0
        def cancel(self):
            self.n += 1
            if self.n in (2,3,7): raise exc
    def cbs():
        cb = Cancel()
        setattr(cb, event, cb.cancel)
        return [cb]
    a,b = twins(n=70, tokens=tokens, cbs=cbs, fit=lambda l,cbs: l.fit(2, 0.05, cbs=cbs))
    assert_twins(a, b)

@pytest.mark.parametrize('order', [-11,0,5,7,100])
def test_cancelling_after_the_backward_pass(order):
    "The gradient is there, so it counts"
    seen,cancelled = [],[]
    class Cancel(Callback):
        run_valid = False
        def after_backward(self):
            if self.iter in (1,6): raise CancelBatchException
    class Mean(Callback):
        "What the gradient should be: the mean over the samples since the last step"
        order,run_valid = 99,False
        def before_fit(self): self.xs,self.ys = [],[]
        def before_backward(self): self.xs.append(self.x); self.ys.append(self.y)
        def before_step(self):
            x,y = torch.cat(self.xs),torch.cat(self.ys)
            expected = torch.autograd.grad(self.learn.loss_func(self.model(x), y), list(self.model.parameters()))
            seen.append(deviation(list(expected), grads(self.learn)))
            self.xs,self.ys = [],[]
    cb = Cancel()
    cb.order = order
    learn = toy(4, n=70)
    learn.fit(2, 0.05, cbs=[GradientAccumulation(16),cb,Mean()])
    assert len(seen)>=8 and max(seen)<1e-12

class Gated(nn.Module):
    "Samples with a positive first feature go through a head that trains, the others do not"
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5,3)
    def forward(self, x):
        if not (x[:,0]>0).any(): return x[:,:3].detach()
        return torch.where(x[:,:1]>0, self.lin(x), x[:,:3])

@pytest.mark.parametrize('n', [64,70])
@pytest.mark.parametrize('opt_func', [SGD,Adam])
def test_micro_batches_without_anything_to_learn(n, opt_func):
    ds = toy_data(n)
    x = ds.tensors[0]
    for i in (0,12,24,60): x[i:i+4,0] = -x[i:i+4,0].abs()   # first, last and middle ones of their macro-batches
    assert (x[:16,0]>0).any()
    a,b = twins(n=n, data=ds, model=lambda: Gated().double(), splitter=lambda m: [list(m.parameters())],
        opt_func=opt_func, fit=fit)
    assert_twins(a, b)

def test_nothing_to_learn_at_all():
    "As in fastai: an error of torch's"
    learn = toy(4, n=64)
    for p in learn.model.parameters(): p.requires_grad_(False)
    with pytest.raises(RuntimeError, match='does not require grad'): learn.fit(1, 0.1, cbs=GradientAccumulation(16))

class Manual(Learner):
    "A loop of its own"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self.loss = self.loss_func(self.pred, *self.yb).float()
        if not self.training: return
        self.loss.backward()
        self.opt.step()
        self.opt.zero_grad()

class Polite(Learner):
    "A loop of its own that leaves the step to fastai"
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training: self._do_grad_opt()

def test_a_learner_that_steps_by_itself():
    learn = toy(4, n=64)
    learn.__class__ = Manual
    before = weights(learn)
    with pytest.raises(ValueError, match='own `_do_one_batch` runs.*_do_grad_opt'):
        learn.fit(1, 0.1, cbs=GradientAccumulation(16))
    assert weights(learn).equal(before) and 'step' not in vars(learn.opt)
    learn.fit(1, 0.1)
    assert not weights(learn).equal(before)

def test_a_learner_whose_step_is_hidden():
    "It steps without the Learner's optimizer: refused after its first batch"
    class Hidden(Learner):
        def _do_one_batch(self):
            if not self.training: return super()._do_one_batch()
            self.loss = self.loss_func(self.model(*self.xb), *self.yb)
            self.loss.backward()
            with torch.no_grad():
                for p in self.model.parameters(): p -= 0.1*p.grad
    learn = toy(4, n=64)
    learn.__class__ = Hidden
    seen = Seen('after_batch', lambda l: l.iter, order=-100)
    with pytest.raises(ValueError, match='own `_do_one_batch`'): learn.fit(1, 0.1, cbs=[GradientAccumulation(16),seen])
    assert seen.values==[0]

def test_a_loop_of_ones_own_that_leaves_the_step_to_fastai():
    def make(*args, **kwargs):
        learn = toy(*args, **kwargs)
        learn.__class__ = Polite
        return learn
    class Cancel(Callback):
        run_valid = False
        def after_pred(self):
            if self.y[0]==-1: raise CancelBatchException
    assert_twins(*twins(n=70, make=make, cbs=lambda: [Cancel()]))

# Loaders

def test_a_loader_that_yields_more_than_it_announced_says_so():
    class Short:
        def __init__(self, dl): self.dl = dl
        def __getattr__(self, nm): return getattr(self.dl, nm)
        def __len__(self): return 10
        def __iter__(self): return iter(self.dl)
    learn = toy(4, n=64)
    learn.dls.loaders[0] = Short(learn.dls.train)
    with pytest.warns(UserWarning, match='announced 10 batches and yields more') as told:
        learn.fit(2, 0.1, cbs=GradientAccumulation(16))
    assert len([o for o in told if 'announced' in str(o.message)])==1

@pytest.mark.parametrize('order', [-20,0,80])
def test_a_loader_that_is_replaced_in_before_train(order):
    def cbs():
        class Replace(Callback):
            def before_train(self):
                if self.epoch==1: self.learn.dl = toy(self.dl.bs, n=36, seed=3).dls.train
        cb = Replace()
        cb.order = order
        return [cb]
    a,b = twins(n=70, cbs=cbs, fit=lambda l,cbs: l.fit_one_cycle(3, 0.1, cbs=cbs))
    assert_twins(a, b)

def test_empty_micro_batches():
    "0 samples: first, in the middle, and last of a macro-batch"
    def loader(bs, batches):
        learn = toy(bs, n=64, opt_func=SGD)
        ds,dl = learn.dls.train.dataset,learn.dls.train
        class Loader:
            n,device,after_batch,dataset = 64,torch.device('cpu'),None,ds
            def __len__(self): return len(batches)
            def __iter__(self): return iter([tuple(t[s] for t in ds.tensors) for s in batches])
        learn.dls.loaders[0] = Loader()
        learn.dls.loaders[0].bs = bs
        return learn
    empty = slice(0,0)
    full = [slice(i,i+4) for i in range(0,64,4)]
    a,b = toy(16, n=64, opt_func=SGD),loader(4, [empty,*full[:2],empty,*full[2:4],empty,*full[4:],empty])
    a.fit(1, 0.1)
    b.fit(1, 0.1, cbs=GradientAccumulation(16))
    assert deviation(weights(a), weights(b))<1e-12 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

def test_a_loader_without_a_batch_says_so():
    learn = toy(4, n=3, whole=4, cbs=GradientAccumulation(16))
    with pytest.warns(UserWarning, match='no batch, so nothing is trained'): learn.fit(1, 0.1)

# Switched off, removed, interrupted

@pytest.mark.parametrize('how', ['run','remove'])
@pytest.mark.parametrize('event,order', [('after_batch',5), ('after_batch',70), ('before_batch',0),
    ('after_backward',0), ('before_backward',0), ('after_loss',0)])
def test_switched_off_in_the_middle_of_a_macro_batch(how, event, order):
    "No gradient of it is left: what follows is a plain fit"
    class Off(Callback):
        run_valid = False
        def off(self):
            if self.iter!=6 or self.epoch: return
            acc = self.learn.gradient_accumulation
            if how=='run': acc.run = False
            else: self.learn.remove_cb(acc)
            self.cleared = not any(g is not None and g.any() for g in grads(self.learn))
    cb,learn = Off(),toy(4, n=64)
    cb.order = order
    setattr(cb, event, cb.off)
    learn.add_cb(GradientAccumulation(16))
    learn.fit(2, 0.1, cbs=cb)
    assert cb.cleared and not {'_backward','_call_one','_with_events','one_batch','_step'}&vars(learn).keys()
    assert not any({'after_batch','after_loss'}&vars(o).keys() for o in learn.cbs if o is not cb)

def test_a_listener_that_is_removed_before_the_epoch_ends_early():
    learn = toy(4, n=64)
    class Mine(Callback): pass
    class Remove(Callback):
        order = 90
        def after_batch(self):
            if self.training and self.iter==5:
                self.learn.remove_cb(self.learn.param_scheduler)
                raise CancelTrainException
    learn.fit_one_cycle(1, 0.1, cbs=[GradientAccumulation(16),Remove()])
    assert len(learn.recorder.losses)==2

# Arguments

def test_accum_bs_and_n_acc_are_one_property():
    acc = GradientAccumulation(256)
    assert acc.n_acc==acc.accum_bs==256
    acc.n_acc = 8
    assert acc.accum_bs==8
    for nm in ('accum_bs','n_acc'):
        for n,exc in ((0,ValueError), (-8,ValueError), ('8',TypeError), (8.,TypeError), (True,TypeError)):
            with pytest.raises(exc, match=f'`{nm}='): setattr(acc, nm, n)
    assert acc.accum_bs==8
    with pytest.raises(TypeError, match="`n_acc='x'`"): GradientAccumulation(256, n_acc='x')

def test_a_schedules_size_cannot_be_set():
    acc = GradientAccumulationSchedule(8, 32)
    with pytest.raises(AttributeError, match='follows the schedule'): acc.accum_bs = 16
    with pytest.raises(AttributeError, match='follows the schedule'): acc.n_acc = 16

def test_another_size_between_fits():
    acc,learn,big = GradientAccumulation(16),toy(4, n=64),toy(16, n=64)
    learn.fit(1, 0.1, cbs=acc); big.fit(1, 0.1)
    acc.n_acc = 8
    big.dls.train.bs = 8
    learn.fit(1, 0.1, cbs=acc); big.fit(1, 0.1)
    assert_twins(big, learn)

@pytest.mark.parametrize('schedule,exc,msg',
    [(lambda s,e: lambda p: float('inf') if 0.2<p<0.3 else 8, ValueError, 'inf at position'),
    (lambda p: 10**400, ValueError, 'at position'), (lambda p: float('nan'), ValueError, 'nan at position'),
    (lambda p: None, ValueError, 'None at position'),
    (dict, TypeError, 'cannot be called with 8 and 32|returned'), (print, TypeError, 'an annealer'),
    (iter, TypeError, 'an annealer')],
    ids=['inf','huge','nan','none','dict','print','iter'])
def test_schedules_that_give_no_sizes(schedule, exc, msg):
    with pytest.raises(exc, match=msg): GradientAccumulationSchedule(8, 32, schedule=schedule)

@pytest.mark.parametrize('size', [lambda: 4, lambda learn, n: n, max, 'len'])
def test_a_size_function_of_another_signature(size):
    if size is max: size = lambda *, learn: 4
    with pytest.raises(TypeError, match='`size='): GradientAccumulation(16, size=size)

@pytest.mark.parametrize('nm', ['accum_bs','n_acc'])
@pytest.mark.parametrize('at,sizes', [(1,[16,24,24, 24,24,16]), (2,[16,16,24,8, 24,24,16]), (4,[16]*4+[24,24,16]),
    (5,[16]*5+[24,24]), (8,[16]*8)])
def test_another_size_within_a_fit(nm, at, sizes):
    """Taken at the next macro-batch: the twin is a plain run on those batches, and the steps that are left share
    what is left of the epoch's progress"""
    class Resize(Callback):
        def before_fit(self): self.n = 0
        def after_step(self):
            self.n += 1
            if self.n==at: setattr(self.learn.gradient_accumulation, nm, 24)
    learn,seen = toy(4, n=64),Seen('before_step', lambda l: (l.gradient_accumulation.macro.samples, l.pct_train),
        order=70)
    learn.fit(2, 0.1, cbs=[GradientAccumulation(16),Resize(),seen])
    assert [o for o,_ in seen.values]==sizes and learn.pct_train==pytest.approx(1)
    pcts = [o for _,o in seen.values]+[1.]
    for epoch in (0,1):
        steps = [pct for pct in pcts if epoch/2<=round(pct, 9)<(epoch+1)/2]+[(epoch+1)/2]
        rest = [b-a for a,b in zip(steps, steps[1:])][at-4*epoch if 0<at-4*epoch<4 else 0:]
        assert rest==pytest.approx([rest[0]]*len(rest)) and steps[0]==pytest.approx(epoch/2)
    big,i = toy(4, n=64),0
    ds = big.dls.train.dataset
    for n in sizes:
        idxs = [o%64 for o in range(i, i+n)]
        big.create_opt() if big.opt is None else None
        big.loss_func(big.model(ds.tensors[0][idxs]), ds.tensors[1][idxs]).backward()
        big.opt.set_hypers(lr=0.1)
        big.opt.step(); big.opt.zero_grad()
        i += n
    assert deviation(weights(big), weights(learn))<1e-12

def test_another_size_is_as_a_new_fit_from_the_next_epoch_on():
    class Resize(Callback):
        def after_epoch(self): self.learn.gradient_accumulation.accum_bs = 8
    learn,big = toy(4, n=64),toy(16, n=64)
    class Loader(Callback):
        def after_epoch(self): self.learn.dls.train.bs = 8
    learn.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(16),Resize()])
    big.fit_one_cycle(2, 0.1, cbs=Loader())
    assert_twins(big, learn)

# Odd lives of a callback

def linear(): return nn.Sequential(nn.Linear(5,3)).double()

class Save(Callback):
    "Pickles the Learner in the middle of a macro-batch"
    order,saved = 80,None
    def after_batch(self):
        if self.training and self.iter==5 and self.saved is None: self.saved = pickle.dumps(self.learn)

@pytest.mark.parametrize('how', ['fit','add_cb'])
def test_a_callback_that_was_added_twice_says_so(how):
    acc = GradientAccumulation(16)
    learn = toy(4, n=64, cbs=acc)
    if how=='fit':
        with pytest.raises(ValueError, match='2 callbacks accumulate'): learn.fit(1, 0.05, cbs=acc)
    else:
        learn.add_cb(acc)
        learn.remove_cb(acc)
    with pytest.raises(RuntimeError, match='still in its `cbs`.*learn.cbs.remove'): learn.fit(1, 0.05)
    learn.cbs.remove(acc)
    learn.fit(1, 0.05, cbs=acc)
    assert len(learn.recorder.losses)==4

@pytest.mark.parametrize('kwargs', [dict(), dict(micro_batch_size='auto'), dict(micro_batch_size=2),
    dict(log_accum_batch=False)], ids=str)
def test_a_learner_that_was_pickled_in_mid_fit(kwargs):
    learn = toy(4, n=64, model=linear, splitter=params, cbs=GradientAccumulation(16, **kwargs))
    learn.loss_func = nn.CrossEntropyLoss()
    save = Save()
    learn.fit(1, 0.05, cbs=save)
    loaded = pickle.loads(save.saved)
    assert '_backward' in vars(loaded)
    assert len(loaded.validate())==1
    loaded.get_preds()
    assert not {'_backward','_call_one','_with_events','one_batch','_do_one_batch','_step'}&vars(loaded).keys()
    loaded.remove_cb(Save)
    loaded.fit(1, 0.05)
    assert len(loaded.recorder.losses)==(16 if 'log_accum_batch' in kwargs else 4)

@pytest.mark.parametrize('tokens', [False,True])
def test_parameters_that_join_in_the_middle_of_an_epoch(tokens):
    class Grow(Callback):
        order = 70
        def before_fit(self): self.n = 0
        def after_step(self):
            self.n += 1
            if self.n!=2: return
            new = nn.Linear(3, 3).double()
            for p,v in zip(new.parameters(), (torch.eye(3), torch.zeros(3))): p.data.copy_(v)
            self.model.add_module('new', new)
            self.opt.param_lists[-1].extend(list(new.parameters()))
    assert_twins(*twins(n=70, tokens=tokens, opt_func=SGD, cbs=lambda: [Grow()], fit=fit))

def test_batches_larger_than_the_loader_says():
    learn = toy(4, n=64)
    dl = learn.dls.train
    def twice(b): return tuple(torch.stack(o).repeat_interleave(2, 0) for o in zip(*b))
    learn.dls.loaders[0] = torch.utils.data.DataLoader(dl.dataset, 4, collate_fn=twice)
    with pytest.warns(UserWarning, match='a batch has 8 samples.*says 4'):
        learn.fit(1, 0.1, cbs=GradientAccumulation(16))
