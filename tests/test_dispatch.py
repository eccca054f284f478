"""While a fit accumulates, callbacks without a method for an event are passed over, and nobody can tell.

The oracle is fastai's own dispatch: the same fit on a Learner whose class has a `_call_one` of its own, which is left
alone.
"""
import copy, sys
import pytest, torch
from functools import wraps
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelFitException,
    CancelStepException, CancelTrainException)
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.torch_core import TensorBase, defaults, to_device
from fastcore.basics import noop
from fastcore.foundation import L
from torch import nn
from fastaccum import GradientAccumulation
from fastaccum.core.dispatch import events
from fastaccum.core.inside import Placed
from fastaccum.testing import assert_twins, toy, toy_data
from common import Raise, weights

ours = {'_call_one','_with_events'}

class Stock(Learner):
    "Its dispatch is its own, so it is fastai's"
    def _call_one(self, event_name): return super()._call_one(event_name)

class Ear(Callback):
    "Hears every event of a batch; `nm` says who"
    def __init__(self, nm, order=0): self.nm,self.order,self.heard = nm,order,None
    def hear(self, event_name): self.heard.append((self.nm, event_name, self.learn.training))
for o in events: setattr(Ear, o, lambda self, o=o: self.hear(o))

class Deaf(Callback):
    "Hears nothing, until it gets a method"
    def __init__(self, order=0): self.order = order

class At(Callback):
    "Do something to the Learner when the `at`th training micro-batch comes to `event`"
    def __init__(self, do, at=5, event='before_batch', order=3):
        self.do,self.order,self.n = do,order,0
        setattr(self, event, lambda: self.count(at))
    def count(self, at):
        self.n += self.learn.training
        if self.learn.training and self.n==at: self.do(self.learn)

class Once(At): "fastai wants a class for each"
class Twice(At): "The same"

def make(cls):
    learn,log = toy(4, n=38),[]
    learn.__class__ = cls
    ears = [Ear('a', -20),Ear('b', 5.5),Ear('c', 55)]
    for o in ears: o.heard = log
    learn.add_cbs([*ears,Deaf()])
    learn.log = log
    return learn

def run(cls, scenario, **kwargs):
    "What is heard, what is raised, and the Learner, of a fit in which `scenario` happens"
    learn,fast = make(cls),[]
    cbs = scenario(learn)
    err = None
    try:
        learn.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(12, **kwargs),
            At(lambda l: fast.append(ours<=vars(l).keys()), at=2),*cbs])
    except BaseException as e: err = type(e),e.args
    assert fast==[cls is Learner], 'the fast dispatch was not at work' if cls is Learner else 'the oracle is not fastai'
    assert ours.isdisjoint(vars(learn))
    return learn,err

scenarios = {}
def scenario(f):
    scenarios[f.__name__] = f
    return f

def note(learn, nm): return lambda *args: learn.log.append((nm,)+args)

@scenario
def nothing(learn): return []

@scenario
def added(learn):
    new = Ear('new', 7)
    new.heard = learn.log
    return [At(lambda l: l.add_cb(new))]

@scenario
def added_in_the_middle_of_an_event(learn):
    "It hears the next event, not this one"
    new = Ear('new', 99)
    new.heard = learn.log
    return [At(lambda l: l.add_cb(new), event='after_loss', order=-30)]

@scenario
def removed(learn): return [At(lambda l: l.remove_cb(next(o for o in l.cbs if getattr(o, 'nm', '')=='c')))]

@scenario
def removed_in_the_middle_of_an_event(learn):
    "It hears this event for the last time"
    return [At(lambda l: l.remove_cb(next(o for o in l.cbs if getattr(o, 'nm', '')=='c')), event='after_pred')]

@scenario
def another_list(learn):
    "Without the last callback, and in another order where orders are equal"
    def do(l): l.cbs = L([o for o in l.cbs if getattr(o, 'nm', '')!='c'][::-1])
    return [At(do)]

@scenario
def a_method_on_an_instance(learn):
    def do(l): vars(l.deaf)['after_loss'] = note(learn, 'instance')
    return [At(do)]

@scenario
def a_method_on_an_instance_within_the_event(learn):
    "A callback that comes later in the same event hears it already"
    def do(l): vars(l.deaf)['before_batch'] = note(learn, 'instance')
    return [At(do, order=-30)]

@scenario
def a_method_taken_off(learn):
    vars(learn.deaf)['after_loss'] = note(learn, 'instance')
    return [At(lambda l: vars(l.deaf).pop('after_loss'))]

@scenario
def a_method_on_a_class(learn):
    class Late(Callback): pass
    return [Late(),At(lambda l: setattr(Late, 'after_pred', lambda self: learn.log.append(('class',))))]

@scenario
def another_class(learn):
    "torch's parametrize changes classes like this"
    class Other(Deaf):
        def before_backward(self): learn.log.append(('other',))
    return [At(lambda l: setattr(l.deaf, '__class__', Other))]

@scenario
def methods_as_arguments(learn): return [Callback(after_loss=lambda self: learn.log.append((self.training,)))]

@scenario
def own_call(learn):
    "A callback that is called with each event by itself"
    class All(Callback):
        order = 20
        def __call__(self, event_name):
            learn.log.append(('all', event_name))
            return super().__call__(event_name)
    return [All()]

@scenario
def own_call_of_an_instance_is_none(learn):
    "Python looks `__call__` up in the class"
    vars(learn.deaf)['__call__'] = note(learn, 'never')
    return []

@scenario
def own_getattr(learn):
    "A callback that makes its methods up"
    class Made(Callback):
        def __getattr__(self, nm):
            if nm=='after_loss': return note(learn, 'made')
            return super().__getattr__(nm)
    return [Made()]

@scenario
def own_getattribute(learn):
    class Made(Callback):
        def __getattribute__(self, nm):
            return note(learn, 'made') if nm=='before_backward' else super().__getattribute__(nm)
    return [Made()]

@scenario
def delegating_elsewhere(learn):
    class Elsewhere(Callback):
        _default = 'other'
        def __init__(self): self.other = nn.Module()
    cb = Elsewhere()
    cb.other.after_pred = note(learn, 'other')
    return [cb]

@scenario
def an_instance_that_delegates_elsewhere(learn):
    other = nn.Module()
    other.after_pred = note(learn, 'other')
    def do(l): vars(l.deaf).update(_default='other', other=other)
    return [At(do)]

@scenario
def filtering_what_is_delegated(learn):
    class Filter(Callback):
        def _component_attr_filter(self, k):
            if k=='after_loss': learn.log.append(('asked',))
            return super()._component_attr_filter(k)
    return [Filter()]

@scenario
def of_another_learner(learn):
    "A callback on two Learners asks the one it was added to last"
    other = toy(4, n=8)
    def do(l):
        other.add_cb(l.deaf)
        other.after_loss = note(learn, 'other')
    return [At(do)]

@scenario
def an_attribute_of_the_learner(learn):
    "Every callback without a method of that name calls it"
    return [At(lambda l: setattr(l, 'after_pred', note(learn, 'learner')))]

@scenario
def a_method_of_the_learners_class(learn):
    cls = type('Sub', (type(learn),), dict(after_loss=lambda self: learn.log.append(('class',))))
    return [At(lambda l: setattr(l, '__class__', cls))]

@scenario
def a_method_of_the_model(learn):
    class Model(nn.Sequential):
        def before_backward(self): learn.log.append(('model',))
    learn.model.__class__ = Model
    return []

@scenario
def a_part_of_the_model(learn):
    "The model runs it, and so does every callback without such a method"
    class Part(nn.Module):
        def forward(self, x=None):
            learn.log.append(('part', x is None))
            return x
    return [At(lambda l: l.model.add_module('after_loss', Part()))]

@scenario
def a_part_of_a_model_that_does_not_run_it(learn):
    class Part(nn.Module):
        def forward(self): learn.log.append(('part',))
    class Wrap(nn.Module):
        def __init__(self, m):
            super().__init__()
            self.m,self.before_backward = m,Part()
        def forward(self, x): return self.m(x)
    return [At(lambda l: setattr(l, 'model', Wrap(l.model)))]

@scenario
def a_parameter_of_the_model(learn):
    "fastai finds it for every callback without such a method, and cannot call it"
    return [At(lambda l: l.model.register_parameter('after_pred', nn.Parameter(torch.zeros(1))))]

@scenario
def a_buffer_of_the_model(learn): return [At(lambda l: l.model.register_buffer('before_backward', torch.zeros(1)))]

@scenario
def an_attribute_of_the_model(learn):
    return [At(lambda l: setattr(l.model, 'after_loss', note(learn, 'model'))),
        Once(lambda l: delattr(l.model, 'after_loss'), at=7)]

@scenario
def a_model_that_makes_its_methods_up(learn):
    class Model(nn.Sequential):
        def __getattr__(self, nm): return note(learn, 'made') if nm=='after_pred' else super().__getattr__(nm)
    return [At(lambda l: setattr(l.model, '__class__', Model))]

@scenario
def another_model(learn):
    class Model(nn.Sequential):
        def before_backward(self): learn.log.append(('model',))
    def do(l):
        new = Model(*l.model)
        new.train()
        l.model = new
    return [At(do)]

@scenario
def another_order(learn):
    def do(l):
        for o in l.cbs:
            if getattr(o, 'nm', '')=='c': o.order = -40
    return [At(do)]

@scenario
def run_false(learn): return [At(lambda l: [setattr(o, 'run', False) for o in l.cbs if getattr(o, 'nm', '')=='b'])]

@scenario
def run_false_and_true_again(learn):
    def switch(on): return lambda l: [setattr(o, 'run', on) for o in l.cbs if getattr(o, 'nm', '')=='b']
    return [At(switch(False)),Once(switch(True), at=8, event='after_loss')]

@scenario
def switched_off_within_an_event(learn):
    return [At(lambda l: [setattr(o, 'run', False) for o in l.cbs if getattr(o, 'nm', '')=='c'], event='after_pred')]

@scenario
def a_callback_that_adds_one_that_adds_one(learn):
    class Second(Ear): pass
    first,second = Ear('first', 8),Second('second', 98)
    first.heard = second.heard = learn.log
    def hear(event_name):
        learn.log.append(('first', event_name))
        if second.learn is None: learn.add_cb(second)
    first.hear = hear
    return [At(lambda l: l.add_cb(first), event='after_pred')]

@scenario
def a_method_that_comes_and_goes(learn):
    "On for one event, off for the next, with as many attributes as before"
    d = vars(learn.deaf)
    def on(l): d.pop('spare', None); d['after_pred'] = note(learn, 'instance')
    def off(l): d.pop('after_pred', None); d['spare'] = 1
    d['spare'] = 1
    return [At(on),Once(off, at=5, event='after_pred', order=90),Twice(on, at=7, event='after_loss')]

@scenario
def run_train_false(learn):
    return [At(lambda l: [setattr(o, 'run_train', False) for o in l.cbs if getattr(o, 'nm', '')=='b'])]

@scenario
def run_valid_false(learn):
    return [At(lambda l: [setattr(o, 'run_valid', False) for o in l.cbs if getattr(o, 'nm', '')=='b'])]

@scenario
def accumulation_switched_off(learn): return [At(lambda l: setattr(l.gradient_accumulation, 'run', False))]

@scenario
def accumulation_removed(learn): return [At(lambda l: l.remove_cb(l.gradient_accumulation))]

@scenario
def predictions_in_between(learn):
    def do(l):
        with l.removed_cbs([o for o in l.cbs if getattr(o, 'nm', '')=='a']): l.get_preds(dl=l.dls.valid, inner=True)
    return [At(do, event='after_batch', order=90, at=6)]

@scenario
def a_property_that_raises(learn):
    class Bad(Callback):
        @property
        def after_loss(self):
            learn.log.append(('property',))
            raise AttributeError('no such thing')
    return [Bad()]

@scenario
def an_event_of_a_model_that_is_no_function(learn): return [At(lambda l: setattr(l.model, 'after_loss', 3))]

@scenario
def wrapped(learn):
    "Somebody listens in on the Learner's dispatch"
    def do(l):
        stock = l._call_one
        def call(event_name):
            learn.log.append(('wrapped', event_name))
            stock(event_name)
        l._call_one = call
    return [At(do, at=7),At(lambda l: vars(l).pop('_call_one'), at=5, event='after_step', order=80)]

@scenario
def a_list_that_sorts_in_its_own_way(learn):
    class Backwards(L):
        def sorted(self, *args, **kwargs): return L(list(super().sorted(*args, **kwargs))[::-1])
    return [At(lambda l: setattr(l, 'cbs', Backwards(list(l.cbs))))]

@pytest.mark.parametrize('nm', scenarios)
def test_everybody_hears_what_fastai_would_tell(nm):
    a,b = run(Stock, scenarios[nm]),run(Learner, scenarios[nm])
    assert a[0].log==b[0].log and a[1]==b[1]
    assert weights(a[0]).equal(weights(b[0]))

@pytest.mark.parametrize('kwargs', [dict(micro_batch_size='auto'),dict(drop_last=True),dict(log_accum_batch=False)],
    ids=str)
def test_with_other_arguments(kwargs):
    for f in (nothing,added,wrapped):
        a,b = run(Stock, f, **kwargs),run(Learner, f, **kwargs)
        assert a[0].log==b[0].log and a[1]==b[1] and weights(a[0]).equal(weights(b[0]))

def test_the_scenarios_matter():
    "Each of them changes what is heard, so the comparison can see it"
    plain = run(Stock, nothing)
    same = [nm for nm,f in scenarios.items() if (o:=run(Stock, f))[0].log==plain[0].log and o[1]==plain[1]]
    assert same==['nothing','own_call_of_an_instance_is_none']

cancels = [CancelBackwardException,CancelBatchException,CancelFitException,CancelStepException,CancelTrainException]

@pytest.mark.parametrize('exc', [RuntimeError,KeyboardInterrupt,*cancels], ids=lambda o: o.__name__)
@pytest.mark.parametrize('event', sorted(events))
def test_exceptions(event, exc):
    "The same is heard until, after and because of an exception, and it is annotated as ever"
    errs = []
    for order in (-30,5,7,60):
        a,b = (run(cls, lambda learn: [Raise(event, exc, order, at=5)]) for cls in (Stock,Learner))
        assert a[0].log==b[0].log and a[1]==b[1] and weights(a[0]).equal(weights(b[0]))
        errs.append(b[1])
    if exc is RuntimeError and event not in ('after_cancel_backward',):
        assert (RuntimeError,(f'Exception occured in `Raise` when calling event `{event}`:\n\tplanted',)) in errs

@pytest.mark.parametrize('permanent', [False,True])
@pytest.mark.parametrize('exc', [None,KeyboardInterrupt,RuntimeError,CancelFitException,CancelTrainException], ids=str)
def test_nothing_is_left_on_the_learner(exc, permanent):
    for event in ('before_fit','before_train','before_batch','after_backward','before_step','after_batch','after_train',
            'before_validate','after_fit'):
        for order in (5,7):
            learn,acc = toy(4, n=38),GradientAccumulation(12)
            learn.fit(1, 0.)
            before = vars(learn).keys()|{'x'}
            cbs = [] if exc is None else [Raise(event, exc, order)]
            if permanent: learn.add_cb(acc)
            try: learn.fit(1, 0.1, cbs=cbs if permanent else [*cbs,acc])
            except BaseException: assert exc is not None   # (a Cancel that nothing waits for ends a fit, too)
            if permanent: learn.remove_cb(acc)
            assert vars(learn).keys()-before<={'lr_finder'} and ours.isdisjoint(vars(learn)) and acc.dispatch is None

def test_left_by_an_interrupt_it_leaves_at_the_next_event():
    "The callback stays on the Learner, and is then taken out of the list behind everybody's back"
    learn = toy(4, n=38, cbs=GradientAccumulation(12))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=Raise('after_batch', KeyboardInterrupt, 5, at=3))
    learn.cbs = learn.cbs.filter(lambda o: not isinstance(o, GradientAccumulation))
    learn.validate()
    assert ours.isdisjoint(vars(learn))

def test_a_stale_one_does_no_harm():
    "Left by an interrupt, it sees the next fit begin"
    a,b = toy(12, n=38),toy(4, n=38, cbs=GradientAccumulation(12))
    with pytest.raises(KeyboardInterrupt): b.fit(1, 0.1, cbs=Raise('after_batch', KeyboardInterrupt, 5, at=3))
    assert ours<=vars(b).keys()
    a.model.load_state_dict(b.model.state_dict())
    for o in (a,b): o.fit(2, 0.1, reset_opt=True)
    assert ours.isdisjoint(vars(b))
    assert_twins(a, b)

@pytest.mark.parametrize('off', [lambda acc: setattr(acc, 'run', False), lambda acc: acc.learn.remove_cb(acc)],
    ids=['run','remove_cb'])
def test_it_leaves_when_accumulation_is_switched_off(off):
    seen,learn,acc = [],toy(4, n=38),GradientAccumulation(12)
    look = [At(lambda l: seen.append(len(ours & vars(l).keys())), at=at, event='after_loss', order=0) for at in (4,5)]
    for i,o in enumerate(look): o.__class__ = type(f'At{i}', (At,), {})   # fastai wants a class for each
    learn.fit(1, 0.1, cbs=[acc,*look,At(lambda l: off(acc))])
    assert seen==[2,0]

def test_several_fits():
    "What has changed between them is heard, and nothing of the fit before"
    def fits(cls):
        learn = make(cls)
        for i in range(3):
            if i==1: vars(learn.deaf)['before_step'] = note(learn, 'instance')
            if i==2:
                learn.remove_cb(next(o for o in learn.cbs if getattr(o, 'nm', '')=='a'))
                learn.model = nn.Sequential(*copy.deepcopy(learn.model))
                learn.create_opt()
            learn.log.append(i)
            learn.fit(1, 0.1, cbs=GradientAccumulation((12,8,16)[i]))
        return learn
    a,b = fits(Stock),fits(Learner)
    assert a.log==b.log and weights(a).equal(weights(b)) and ('instance',) in b.log

def test_another_fit_within_the_fit():
    "Of the same Learner, in the middle of an epoch, which goes on with what the other has left"
    def nested(cls):
        learn = make(cls)
        class Inner(Callback):
            def after_epoch(self):
                learn = self.learn
                if self.epoch: return
                learn.log.append('inner')
                with learn.removed_cbs([self]): learn.fit(1, 0.01)
                learn.log.append('outer')
                learn.n_epoch = 2
        learn.fit(2, 0.1, cbs=[GradientAccumulation(12),Inner()])
        return learn
    a,b = nested(Stock),nested(Learner)
    assert a.log==b.log and weights(a).equal(weights(b)) and 'inner' in b.log and ours.isdisjoint(vars(b))

def own(nm):
    def f(self, *args, **kwargs): return getattr(super(Own, self), nm)(*args, **kwargs)
    Own = type('Own', (Learner,), {nm:f})
    return Own

@pytest.mark.parametrize('nm', ['__call__','_call_one','_with_events','__getattr__','__getattribute__',
    '_component_attr_filter'])
def test_a_learner_with_a_dispatch_of_its_own_keeps_it(nm):
    learn,fast = toy(4, n=38),[]
    learn.__class__ = own(nm)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),At(lambda l: fast.append(ours & vars(l).keys()))])
    assert fast==[set()]

@pytest.mark.parametrize('nm', sorted(ours))
def test_a_dispatch_on_the_instance_is_kept(nm):
    learn,called,fast = toy(4, n=38),[],[]
    stock = getattr(learn, nm)
    def f(*args):
        called.append(args)
        return stock(*args)
    vars(learn)[nm] = f
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),
        At(lambda l: fast.append((vars(l)[nm], len(ours & vars(l).keys()))))])
    assert fast==[(f,1)] and vars(learn)[nm] is f and len(called)>20

def test_a_learner_that_delegates_elsewhere_keeps_its_dispatch():
    learn,fast = toy(4, n=38),[]
    vars(learn).update(_default='other', other=nn.Module())
    learn.other.after_pred = lambda: None
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),At(lambda l: fast.append(ours & vars(l).keys()))])
    assert fast==[set()]

def silent_calls(learn, cbs):
    "The events with which fastai's `Callback.__call__` was called for a `Deaf`"
    code,seen = Callback.__call__.__code__,[]
    def profile(frame, what, arg):
        if what=='call' and frame.f_code is code and isinstance(frame.f_locals['self'], Deaf):
            seen.append(frame.f_locals['event_name'])
    sys.setprofile(profile)
    try: learn.fit(1, 0.1, cbs=[Deaf(),*cbs])
    finally: sys.setprofile(None)
    return seen

def test_it_saves_something():
    """Who has no method is not asked while the fit trains and validates; it is without accumulation, and at the
    events of a fit"""
    asked,seen = silent_calls(toy(4, n=38), []),silent_calls(toy(4, n=38), [GradientAccumulation(12)])
    assert events & set(asked)>={'before_batch','after_batch','before_step'} and not events & set(seen)
    assert {'before_fit','after_train','after_epoch','after_fit'}<=set(seen)

def test_the_class_is_looked_at_again_each_epoch(monkeypatch):
    """A profiler that replaces `Callback.__call__` while we train is asked from the next epoch on, one from before
    at once"""
    def replace(l=None):
        stock = Callback.__call__
        @wraps(stock)   # and says it were fastai's
        def call(self, event_name):
            seen.append(event_name)
            return stock(self, event_name)
        monkeypatch.setattr(Callback, '__call__', call)
    for at_once in (False,True):
        seen = []
        if at_once: replace()
        learn = toy(4, n=12, cbs=Deaf())
        n = len(learn.cbs)+2
        learn.fit(2, 0.1, cbs=[GradientAccumulation(12),At(noop if at_once else replace, at=2)])
        assert seen.count('after_pred')>=(2 if at_once else 1)*3*(n-1)   # the accumulation callback is a `Guest`
        monkeypatch.undo()

def test_the_models_class_is_looked_at_again_each_epoch():
    "From the next epoch on it makes a method up, which every callback without one calls"
    def heard(cls):
        learn = make(cls)
        class Model(nn.Sequential): pass
        learn.model.__class__ = Model
        def made(self, nm): return note(learn, 'made') if nm=='after_pred' else nn.Module.__getattr__(self, nm)
        class Change(Callback):
            def after_epoch(self): Model.__getattr__ = made
        learn.fit(2, 0.1, cbs=[GradientAccumulation(12),Change()])
        return learn.log
    log = heard(Stock)
    assert ('made',) in log and heard(Learner)==log

def test_a_replaced_dispatch_of_the_class_is_seen_in_the_next_epoch(monkeypatch):
    stock,seen = Learner._call_one,[]
    def replace(l):
        @wraps(stock)
        def call(self, event_name):
            seen.append(event_name)
            return stock(self, event_name)
        monkeypatch.setattr(Learner, '_call_one', call)
    learn = toy(4, n=12)
    learn.fit(2, 0.1, cbs=[GradientAccumulation(12),At(replace, at=2)])
    assert seen.count('after_pred')==4   # three micro-batches and a batch of validation

def test_who_kept_our_dispatch_can_still_call_it():
    kept,learn = [],toy(4, n=38)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),At(lambda l: kept.append(l._call_one))])
    learn._call_one = kept[0]
    fresh = toy(4, n=38)
    fresh.model.load_state_dict(learn.model.state_dict())
    for o in (fresh,learn): o.fit(1, 0.1, reset_opt=True)
    assert len(learn.recorder.losses)==10 and ours.isdisjoint(vars(learn))
    assert_twins(fresh, learn)

def halves(m): return [list(m[:2].parameters()), list(m[2:].parameters())]

def test_exported_in_the_middle_of_a_fit(tmp_path):
    "The loaded Learner has a dispatch that is its own, and leaves"
    class Saver(Callback):
        order = 99
        def after_train(self):
            learn = self.learn
            learn.remove_cb(self)   # a class of a test cannot be pickled
            old = {nm:vars(learn)[nm] for nm in ('opt','dls','logger')}
            learn.logger,learn.opt,learn.dls = print,None,DataLoaders(DataLoader([], bs=4), DataLoader([], bs=4))
            torch.save(learn, tmp_path/'l.pkl')
            vars(learn).update(old)
            learn.add_cb(self)
    learn = toy(4, n=38, cbs=GradientAccumulation(12), splitter=halves, loss_func=nn.CrossEntropyLoss())
    learn.dls.train.get_idxs = learn.dls.train.get_idxs.__class__(38, 38, False, 0)
    learn.fit(1, 0.05, cbs=Saver())
    loaded = torch.load(tmp_path/'l.pkl', weights_only=False)
    assert ours<=vars(loaded).keys() and loaded._call_one.__self__.learn is loaded
    loaded('after_pred')
    loaded.remove_cb(loaded.gradient_accumulation)
    assert ours.isdisjoint(vars(loaded))
    x = toy_data(38).tensors[0]
    preds = loaded.get_preds(dl=DataLoader([(o,torch.tensor(0)) for o in x], bs=8))[0]
    with torch.no_grad(): assert preds.allclose(learn.model(x))

def test_copied_in_the_middle_of_a_fit():
    "Each of the two Learners has its own dispatch"
    copies = []
    def do(l):
        memo = {id(l.dls):l.dls, id(copies):copies}
        copies.append(copy.deepcopy(l, memo))   # nothing has a graph yet
    learn = toy(4, n=38)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),At(do, at=1)])
    other, = copies
    assert ours.isdisjoint(vars(learn)) and other._call_one.__self__.learn is other
    assert other.gradient_accumulation.dispatch.learn is other
    other.remove_cb(other.gradient_accumulation)
    assert ours.isdisjoint(vars(other))

def test_two_learners_at_a_time():
    "One trains within the other's fit"
    inner = toy(4, n=38)
    twin = toy(12, n=38)
    twin.fit(1, 0.1)
    learn = toy(4, n=38)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),At(lambda l: inner.fit(1, 0.1, cbs=GradientAccumulation(12)))])
    assert_twins(twin, inner); assert_twins(twin, learn)

def test_what_is_asked_of_fastais_tensors_costs():
    """The loss of fastai's own loss functions is a `TensorBase`, of which each question takes long: none is asked
    per micro-batch"""
    asked = []
    class Loud(TensorBase):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if sys._getframe(1).f_globals.get('__name__', '').startswith('fastaccum'): asked.append(func)
            return super().__torch_function__(func, types, args, kwargs)
    class Loss(nn.CrossEntropyLoss):
        def forward(self, pred, targ): return super().forward(pred, targ).as_subclass(Loud)
    learn = toy(4, n=38, loss_func=Loss())
    learn.remove_cb(learn.float32_loss)
    learn.model.float()
    learn.dls.train.dataset.tensors = (learn.dls.train.dataset.tensors[0].float(), learn.dls.train.dataset.tensors[1])
    learn.fit(1, 0.1, cbs=GradientAccumulation(12))
    assert not asked

n_batches = 12   # of `toy(4, n=38)` in an epoch, of training and validation

def called(learn, f, key, **kwargs):
    "What `key` says of each call of fastai's function `f` while `learn` trains"
    code,seen = f.__code__,[]
    def profile(frame, what, arg):
        if what=='call' and frame.f_code is code: seen.append(key(frame.f_locals))
    sys.setprofile(profile)
    try: learn.fit(1, 0.1, **kwargs)
    finally: sys.setprofile(None)
    return seen

def test_events_within_a_batch_make_no_list():
    def count(cbs): return called(toy(4, n=38), Learner.__call__, lambda d: d['event_name'], cbs=cbs).count('after_pred')
    assert count([])==n_batches and count([GradientAccumulation(12)])==0   # of training, and of validation
    learn = toy(4, n=38)
    learn.__class__ = type('Sub', (Learner,), dict(show=lambda self: 0))   # of TextLearner's kind
    assert not called(learn, Learner.__call__, lambda d: d['event_name'], cbs=GradientAccumulation(12)).count('after_pred')

names = Learner._do_one_batch.__code__.co_names

@pytest.mark.parametrize('nm', ['pred','loss_grad','loss','training','yb'])
def test_a_learner_with_a_property_of_its_own(nm):
    "It is asked, and told, as by fastai"
    assert nm in names
    def make_one(base):
        seen = []
        def get(self):
            seen.append('get')
            return vars(self)['own_'+nm]
        def put(self, v):
            seen.append('put')
            vars(self)['own_'+nm] = v
        learn = toy(4, n=38)
        vars(learn)['own_'+nm] = vars(learn).pop(nm, None)
        learn.__class__ = type('Sub', (base,), {nm:property(get, put)})
        return learn,seen
    runs = []
    for base in (Stock,Learner):
        learn,seen = make_one(base)
        learn.fit(1, 0.1, cbs=GradientAccumulation(12))
        runs.append((seen.count('put'), weights(learn)))
    assert runs[0][0]==runs[1][0]>0 and runs[0][1].equal(runs[1][1])

def test_a_learner_that_sets_attributes_its_own_way():
    runs = []
    for base in (Stock,Learner):
        told,learn = [],toy(4, n=38)
        def put(self, nm, v):
            told.append(nm)
            object.__setattr__(self, nm, v)
        learn.__class__ = type('Sub', (base,), dict(__setattr__=put))
        learn.fit(1, 0.1, cbs=GradientAccumulation(12))
        runs.append([o for o in told if o in ('pred','loss_grad','loss')])
    assert runs[0]==runs[1]!=[]

def test_the_batch_of_another_learner_is_its_own():
    "It is run by way of the one that accumulates"
    learn,other = toy(4, n=38),toy(4, n=8)
    other.xb,other.yb,other.pred = *((o,) for o in other.dls.one_batch()),None
    other.model.eval()
    learn.fit(1, 0.1, cbs=[GradientAccumulation(12),
        At(lambda l: l._with_events(other._do_one_batch, 'batch', CancelBatchException))])
    assert other.pred.equal(other.model(*other.xb))

@pytest.mark.parametrize('how', ['class','instance','replaced'])
def test_a_batch_of_its_own_way_keeps_it(how, monkeypatch):
    "It runs on the Learner itself"
    seen,stock,learn = [],Learner._do_one_batch,toy(4, n=38)
    def f(self):
        seen.append(self)
        return stock(self)
    if how=='class': learn.__class__ = type('Sub', (Learner,), dict(_do_one_batch=f))
    elif how=='replaced': monkeypatch.setattr(Learner, '_do_one_batch', wraps(stock)(f))
    else: learn._do_one_batch = lambda: f(learn)
    learn.fit(1, 0.1, cbs=GradientAccumulation(12))
    assert len(seen)==n_batches and all(o is learn for o in seen)

def test_another_dictionary_of_attributes():
    "Somebody gives the Learner a new `__dict__` in the middle of a batch"
    a,b = (make(cls) for cls in (Stock,Learner))
    for o in (a,b):
        def do(l): l.__dict__ = dict(vars(l))
        o.fit(1, 0.1, cbs=[GradientAccumulation(12),At(do, at=2, event='after_step')])
    assert a.log==b.log and weights(a).equal(weights(b))

def moves(learn, **kwargs): return len(called(learn, to_device, lambda d: 0, **kwargs))

def test_a_batch_that_is_in_place_is_not_moved():
    "Neither of plain tensors nor of fastai's; without accumulation, and outside of fits, fastai moves as ever"
    for cls in (torch.Tensor,TensorBase):
        learn = toy(4, n=38)
        learn.dls.device = None
        stock = learn.dls.train.create_batch
        learn.dls.train.create_batch = lambda b: tuple(o.as_subclass(cls) for o in stock(b))
        assert moves(learn)==n_batches and moves(learn, cbs=GradientAccumulation(12))==0 and moves(learn)==n_batches
        assert '_set_device' not in vars(learn)

def test_nothing_is_asked_of_a_batch_of_fastais_tensors():
    asked,learn = [],toy(4, n=38)
    class Loud(TensorBase):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if sys._getframe(1).f_globals.get('__name__')=='fastaccum.core.inside': asked.append(func)
            return super().__torch_function__(func, types, args, kwargs)
    stock = learn.dls.train.create_batch
    learn.dls.train.create_batch = lambda b: tuple(o.as_subclass(Loud) for o in stock(b))
    assert moves(learn, cbs=GradientAccumulation(12))==0 and asked==[]

def test_where_a_model_is():
    "Its first parameter says so, wherever that is; what fastai asks otherwise, fastai is asked"
    learn = toy(4, n=38)
    first = nn.Identity()
    first.register_parameter('none', None)
    first.register_module('none_too', None)
    learn.model.insert(0, first)
    assert moves(learn, cbs=GradientAccumulation(12))==0
    placed,b = Placed(learn),next(iter(learn.dls.train))
    placed.move.enter()
    learn.model[1] = nn.Linear(5, 6, device='meta')   # a part of it is another
    learn.model[1].register_parameter('weight', None)
    assert learn._set_device(b)[0].device.type=='meta'
    class Elsewhere(nn.Sequential):
        def parameters(self, recurse=True): return iter([torch.zeros(1, device='meta')])
    learn.model = Elsewhere(nn.Linear(5, 3))
    assert learn._set_device(b)[0].device.type=='meta'
    learn.model = nn.Identity()
    with pytest.raises(StopIteration): learn._set_device(b)

def test_fastai_that_is_to_use_the_cpu_is_asked(monkeypatch):
    monkeypatch.setattr(defaults, 'use_cuda', False)
    assert moves(toy(4, n=38), cbs=GradientAccumulation(12))==n_batches

def test_what_is_not_in_place_is_moved():
    "A part that is no tensor, a batch that is a dict, a model that was moved, a class with a way of its own"
    def of(change, data=lambda b: b):
        learn = toy(4, n=38)
        stock = learn.dls.train.create_batch
        learn.dls.train.create_batch = lambda b: data(stock(b))
        acc,placed = GradientAccumulation(12),[]
        learn.add_cb(acc)
        change(learn)
        class Look(Callback):
            order = -30
            def before_batch(self): placed.append(self.learn._set_device)
        return learn,placed,Look()
    learn,placed,look = of(noop, data=lambda b: ([b[0]],b[1]))
    learn.model.register_forward_pre_hook(lambda m, xs: tuple(xs[0]) if isinstance(xs[0], list) else None)
    assert moves(learn, cbs=look)==10   # and not those of validation
    learn,placed,look = of(lambda l: setattr(l, '__class__', type('Sub', (Learner,), dict(_set_device=lambda self, b: b))))
    learn.fit(1, 0.1, cbs=look)
    assert '_set_device' not in vars(learn) and all(o.__func__ is type(learn)._set_device for o in placed)
    learn,placed,look = of(noop)
    learn._set_device = mine = lambda b: b
    learn.fit(1, 0.1, cbs=look)
    assert set(placed)=={mine} and learn._set_device is mine

def test_a_model_on_another_device_gets_its_batches():
    "It was moved in the middle of the fit: the next batch goes there"
    seen,learn = [],toy(4, n=38)
    class Stop(Callback):
        order = -30
        def before_batch(self):
            seen.append(self.x.device.type)
            if len(seen)==4: raise CancelFitException
        def after_batch(self):
            if len(seen)==3: self.model.to('meta')
    learn.fit(1, 0.1, cbs=[GradientAccumulation(4),Stop()])
    assert seen==['cpu']*3+['meta']
