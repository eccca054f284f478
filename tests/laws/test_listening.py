"""Other callbacks get the events that fastai documents, and exceptions have their effect in fastai.

Events of a micro-batch are those of a fit on micro-batches. Events of a step, an epoch or a fit are
those of the full-batch run.
"""
import pytest
from itertools import count, product
from random import Random
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelEpochException,
    CancelFitException, CancelStepException, CancelTrainException)
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_same_run, deviation, toy, both_runs
from common import BatchListLoader, RaiseAt, RecordAt, grads, in_chunks, pick_cases, weights

of_micro = ['before_batch','after_pred','after_loss','before_backward','after_backward']
cancelled = ['after_cancel_batch','after_cancel_backward']
of_step = ['before_step','after_cancel_step','after_step']
of_fit = [f'{o}_{nm}' for nm in ('fit','epoch','train','validate') for o in ('before','after','after_cancel')]

class Listener(Callback):
    "Appends the tuple (`nm`, event, whether in training) to the list `heard` at each event"
    def __init__(self, nm, order, heard): self.nm,self.order,self.heard = nm,order,heard
    def hear(self, event): self.heard.append((self.nm, event, self.learn.training))
for o in of_micro+cancelled+of_step+of_fit: setattr(Listener, o, lambda self, o=o: self.hear(o))

class NoMethods(Callback): "Has no method for any event, until a test sets one on the instance"

def run(bs, accum, more=lambda learn: []):
    "Return the events that callbacks get in a fit, and the exception that the fit raises"
    learn,heard,err = toy(bs, n=38),[],None
    learn.heard,learn.listeners = heard,[Listener('a', -20, heard),Listener('b', 5.5, heard),Listener('c', 55, heard)]
    learn.add_cbs([*learn.listeners,NoMethods()])
    try: learn.fit_one_cycle(2, 0.1, cbs=[*more(learn), *([GradientAccumulation(accum)] if accum else [])])
    except BaseException as e: err = type(e),e.args
    return heard,err

def filtered(heard, events):
    "Return the entries of `heard` that are about these events"
    return [o for o in heard if o[1] in events]

def test_micro_batches_send_their_events_and_the_other_events_are_those_of_the_full_batch_run():
    heard,step = run(4, 12)[0],['before_step','after_step']
    by_a = [o for nm,o,training in filtered(heard, of_micro+of_step) if nm=='a' and training]
    assert by_a==2*(3*(3*of_micro+step)+of_micro+step)
    assert filtered(heard, of_step+of_fit)==filtered(run(12, None)[0], of_step+of_fit)

def note(learn, nm):
    "Return a method `after_loss` that appends to `heard` like a `Listener` of this name"
    return lambda *_: learn.heard.append((nm, 'after_loss', learn.training))

class DoAt(Callback):
    """Calls `do(learn)` once, at the fifth micro-batch of the fit, or with `at_end` after the sixth

    The sixth micro-batch ends the second step.
    """
    order,run_valid = 3,False
    def __init__(self, do, at_end=False): self.do,self.at_end,self.n = do,at_end,0
    def before_batch(self):
        self.n += 1
        if self.n==5 and not self.at_end: self.do(self.learn)
    def after_batch(self):
        if self.n==6 and self.at_end: self.do(self.learn)

def added(learn): return DoAt(lambda l: l.add_cb(Listener('new', 7, l.heard)))
def removed(learn): return DoAt(lambda l: l.remove_cb(l.listeners[2]))
def switched_off(learn): return DoAt(lambda l: setattr(l.listeners[1], 'run', False))
def not_in_validation(learn): return DoAt(lambda l: setattr(l.listeners[1], 'run_valid', False))
# a new `order`, or a new method of an instance, counts from the next step
def another_order(learn): return DoAt(lambda l: setattr(l.listeners[2], 'order', -40), True)
def a_method_of_an_instance(learn):
    return DoAt(lambda l: setattr(l.no_methods, 'after_loss', note(l, 'no_methods')), True)
def a_method_as_an_argument(learn): return Callback(after_loss=note(learn, 'argument'))

@pytest.mark.parametrize('more', [added,removed,switched_off,not_in_validation,another_order,
    a_method_of_an_instance,a_method_as_an_argument], ids=lambda o: o.__name__)
def test_events_of_micro_batches_come_as_in_a_fit_on_micro_batches(more):
    "A callback is added, removed or changed within an epoch, or has a method that no class defines"
    heard = [filtered(run(4, accum, lambda learn: [more(learn)])[0], of_micro[:4]) for accum in (12,None)]
    assert heard[0]==heard[1]!=filtered(run(4, 12)[0], of_micro[:4])

@pytest.mark.parametrize('per_step', [None,True,False])
@pytest.mark.parametrize('has_before_batch', [False,True])
@pytest.mark.parametrize('bs,acc', [(4,{}), (12,dict(micro_batch_size=4)), (6,dict(micro_batch_size=4))])
def test_after_batch_comes_once_a_step_or_with_per_step_false_once_a_batch(has_before_batch, per_step, bs, acc):
    class Ends(Callback):
        run_valid,n = False,0
        def after_batch(self): self.n += 1
    if has_before_batch: Ends.before_batch = lambda self: None
    if per_step is not None: Ends.per_step = per_step
    cb = Ends()
    toy(bs, n=48).fit(1, cbs=[GradientAccumulation(12, **acc),cb])
    assert cb.n==(48//bs if per_step is False else 4)

excs = [RuntimeError,KeyboardInterrupt,CancelFitException,CancelEpochException,CancelTrainException]
# pairs of an event and an exception that a callback raises there
raised = [*product(of_micro[:4]+of_step[::2], excs), *((o,CancelBatchException) for o in of_micro[:4]),
    ('before_backward',CancelBackwardException), ('before_step',CancelStepException)]

# the last six cancel a micro-batch, a backward pass or a step
cancel_a_part = [(*o, 7) for o in raised[-6:]]
@pytest.mark.parametrize('event,exc,order', dict.fromkeys([*cancel_a_part,
    *pick_cases(44, [(*o, order) for o in raised for order in (-30,5,7,60)])]))
def test_an_exception_has_the_events_and_the_message_of_fastai(event, exc, order):
    "Events of a micro-batch are compared with a plain fit, events of a step with the full-batch run"
    # `after_cancel_batch` comes once for a cancelled step, and not for a cancelled micro-batch
    of_part = [o for o in cancelled if o!='after_cancel_batch']
    bs,events = (12,of_step) if event in of_step else (4,of_micro[:4]+of_part)
    (a,err),(b,other) = (run(*o, lambda learn: [RaiseAt(event, exc, order, skip=3)]) for o in ((bs,None),(4,12)))
    assert err==other and filtered(a, events+of_fit)==filtered(b, events+of_fit)
    if exc is RuntimeError: assert f'event `{event}`' in err[1][0]

@pytest.mark.parametrize('seed', pick_cases(40, range(300)))
def test_a_cancelled_micro_batch_is_left_out(seed):
    """Each step is the mean over its other micro-batches, and begins where it begins without the cancelling

    If the backward passes of all its micro-batches are cancelled, the optimizer steps nevertheless, as in fastai.
    """
    r = Random(seed)
    micro,accum,n = r.randint(1, 5),r.randint(5, 24),r.randint(25, 60)
    cancelled_ones = {i for i in range(-(-n//micro)) if r.random()<.3}   # numbers of micro-batches
    exc = r.choice([CancelBatchException,CancelBackwardException])
    event = r.choice(of_micro[:4]) if exc is CancelBatchException else 'before_backward'
    def cancel(l, i=count()):
        if next(i) in cancelled_ones: raise exc
    cancels = RecordAt(event, cancel, order=r.choice([-11,-5,5,7,55,100]))
    learn,steps = toy(micro, n=n),[RecordAt('after_step', grads, order=100) for _ in range(2)]
    full = -(-accum//micro)*micro
    drop_last = seed%2==0 and n>=full
    learn.fit(1, 0.05, cbs=[GradientAccumulation(accum, drop_last=drop_last),cancels,steps[0]])
    planned = [o for o in in_chunks([*range(n)], full) if len(o)==full or not drop_last]
    kept = [[i for i in step if i//micro not in cancelled_ones] for step in planned]
    big = toy(full, n=n)
    steps_anyway = exc is CancelBackwardException
    of_big = [rest or whole for rest,whole in zip(kept, planned) if rest or steps_anyway]
    big.dls.loaders[0] = BatchListLoader(big.dls.train_ds, [of_big])
    def cancel_whole(l):
        if steps_anyway and not kept[l.iter]: raise exc
    big.fit(1, 0.05, cbs=[RecordAt('before_backward', cancel_whole),steps[1]])
    assert deviation(weights(big), weights(learn))<1e-7 and deviation(steps[1].values, steps[0].values)<1e-7
    # a step whose micro-batches are all cancelled has an entry, too
    assert len(learn.recorder.losses)==len(planned)
    if all(kept): assert deviation(big.recorder.losses, learn.recorder.losses)<2e-6

@pytest.mark.parametrize('order', [-11,0,7,55])
@pytest.mark.parametrize('kwargs', [dict(), dict(n=67, tokens=True), dict(acc=dict(drop_last=True))], ids=str)
def test_a_cancelled_step_is_skipped_as_in_the_full_batch_run(kwargs, order):
    assert_same_run(*both_runs(cbs=lambda: [RaiseAt('before_step', CancelStepException, order, skip=2)], **kwargs))
