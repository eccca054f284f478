"""Cases in which a fuzzer once found a wrong run without a warning

Each case is right now, or refused, or warned of.
"""
import fastaccum, os, sys, numpy as np, pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, IterableDataset, SubsetRandomSampler
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.data import PartialDL
from fastai.learner import Learner
from fastaccum import (ActivationCheckpoint, FreezeBN, GradientAccumulation, GradientAccumulationSchedule,
    GradientCache, NoiseScale, ScaledLR)
from fastaccum.step.split import AutoSize
from fastaccum.testing import assert_same_run, both_runs, toy, toy_data
from common import CallAt, RecordAt, weights_unchanged
from test_warned import count_warnings, fit, not_a_mean, warnings_and_runs, weights_apart

# A Learner's own `one_batch`

class DoublesInputs(Learner):
    def one_batch(self, i, b):
        self.iter = i
        self._split((b[0]*2,b[1]))
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

def trains_twice(learn, i, b):
    for _ in range(2): Learner.one_batch(learn, i, b)

def in_a_subclass(learn): learn.__class__ = DoublesInputs
def on_the_instance(learn): learn.one_batch = partial(trains_twice, learn)

@pytest.mark.parametrize('replace', [in_a_subclass,on_the_instance])
def test_a_learner_with_its_own_one_batch_is_refused(replace):
    learn = toy(4)
    replace(learn)
    with weights_unchanged(learn), pytest.raises(ValueError, match='(?s)own `one_batch`.*#own-training-loop'):
        learn.fit(1, 0.1, cbs=GradientAccumulation(16))

# Hooks on parameters

def clips(g): return g.clamp(-.02, .02)
def normalizes(g): return g/g.norm()
warning_of_hooks = ('AccumulationWarning','parameter-hooks')

def learner_with_hook(*args, hook=clips, trains=True, **kwargs):
    learn = toy(*args, **kwargs)
    weight = learn.model[2].weight
    if hook: weight.register_hook(hook)
    weight.requires_grad_(trains)
    return learn

@pytest.mark.parametrize('hook', [clips,normalizes])
def test_a_hook_on_a_parameter_is_warned_of_and_named_in_the_check(hook):
    warned,a,b = warnings_and_runs(make=partial(learner_with_hook, hook=hook))
    assert warned=={warning_of_hooks:1} and weights_apart(a, b)>1e-4
    row, = [o for o in learner_with_hook(4, hook=hook).accum_check(16).rows if o.what=='gradients']
    assert not row.ok and 'the hook on the parameter 2.weight' in row.where and 'before_step' in row.remedy

@pytest.mark.parametrize('kwargs', [dict(trains=False),dict(hook=None)])
def test_a_hook_that_does_not_run_is_not_warned_of(kwargs):
    assert not warnings_and_runs(make=partial(learner_with_hook, **kwargs))[0]

def test_a_hook_on_a_parameter_is_right_if_each_step_is_one_batch():
    warned,a,b = warnings_and_runs(make=learner_with_hook, micro=16)
    assert not warned and weights_apart(a, b)<1e-12

# Loaders whose samples are hard to count

class Stream(IterableDataset):
    "A stream of `n` samples that knows its length"
    def __init__(self, n): self.data = toy_data(n)
    def __len__(self): return len(self.data)
    def __iter__(self): return iter(self.data)

def stream(bs): return TorchDataLoader(Stream(70), batch_size=bs)
def partly(bs): return PartialDL(toy_data(90), bs=bs, partial_n=70)
def subset(bs):
    sampler = SubsetRandomSampler(range(70), generator=torch.Generator().manual_seed(0))
    return TorchDataLoader(toy_data(90), batch_sampler=BatchSampler(sampler, bs, drop_last=False))

@pytest.mark.parametrize('dl', [stream,partly,subset])
@pytest.mark.parametrize('bs,acc,full', [(32,dict(micro_batch_size=4),16), (8,dict(drop_last=True),24)])
def test_the_number_of_steps_fits_the_number_of_samples_of_the_loader(dl, bs, acc, full):
    learn = toy(4)
    learn.dls.loaders[0] = dl(bs)
    np.random.seed(0)
    warned = count_warnings(lambda: learn.fit_one_cycle(2, 0.1, cbs=GradientAccumulation(full, **acc)))
    n = 70//full if 'drop_last' in acc else -(-70//full)
    assert not warned and len(learn.recorder.lrs)==2*n and abs(learn.pct_train-1)<1e-9

class WrongLength:
    "A loader of `n` samples in batches of `bs`, whose `len` is `n_batches`, which may be wrong"
    def __init__(self, n, bs, n_batches): self.ds,self.bs,self.n_batches = toy_data(n),bs,n_batches
    def __len__(self): return self.n_batches
    def __iter__(self): return iter([self.ds[i:i+self.bs] for i in range(0, len(self.ds), self.bs)])

# A loader has 66 samples in batches of 4, so 17 batches. Each case: the `len` of this loader, arguments
# of the callback with steps of 16, and whether this `len` announces steps that do not come
@pytest.mark.parametrize('n_batches,acc,steps_missing', [(17,{},False), (20,{},False), (21,{},True), (30,{},True),
    (17,dict(drop_last=True),False), (20,dict(drop_last=True),True), (20,dict(micro_batch_size=2),False)])
def test_fewer_batches_than_planned_are_warned_of(n_batches, acc, steps_missing):
    learn = toy(4)
    learn.dls.loaders[0] = WrongLength(66, 4, n_batches)
    warned = count_warnings(lambda: learn.fit(2, 0.01, cbs=GradientAccumulation(16, **acc)))
    assert warned==({('','fewer-batches'):1} if steps_missing else {})
    assert (learn.pct_train<1-1e-9)==steps_missing

def test_cancelled_micro_batches_do_not_count_as_missing_in_the_loader():
    def cancel_odd(learn):
        if learn.iter%2: raise CancelBatchException
    cancels = CallAt('before_batch', cancel_odd)
    warned = count_warnings(lambda: toy(4).fit(2, 0.01, cbs=[GradientAccumulation(16),cancels]))
    assert ('','fewer-batches') not in warned

# Losses with a state

class Centred(nn.Module):
    "A loss that subtracts a running mean of the predictions, like that of DINO"
    def __init__(self):
        super().__init__()
        self.register_buffer('centre', torch.zeros(3).double())
    def forward(self, p, y):
        loss = F.cross_entropy(p-self.centre, y)
        self.centre = .9*self.centre+.1*p.detach().mean(0)
        return loss

class WarmsUp(nn.CrossEntropyLoss):
    "A loss that grows over its first 40 calls"
    n_calls = 0
    def forward(self, p, y):
        self.n_calls += 1
        return super().forward(p, y)*min(1, self.n_calls/40)

class Counts(nn.CrossEntropyLoss):
    "A loss that counts its calls, which does not change its value"
    n_calls = 0
    def forward(self, p, y):
        self.n_calls += 1
        return super().forward(p, y)

with_state = ('StateWarning','loss-with-state')

@pytest.mark.parametrize('loss', [Centred,WarmsUp])
def test_a_loss_that_depends_on_earlier_calls_is_warned_of_and_the_cache_is_exact(loss):
    warned,a,b = warnings_and_runs(loss_func=loss())
    assert warned=={with_state:1} and weights_apart(a, b)>1e-4
    a,b = (toy(16, loss_func=loss()) for _ in range(2))
    fit(a, None)
    fit(b, GradientCache(micro_batch_size=4))
    assert weights_apart(a, b)<1e-12

def test_a_loss_that_only_counts_its_calls_is_right():
    warned,a,b = warnings_and_runs(loss_func=Counts())
    assert not warned and weights_apart(a, b)<1e-7

# Losses that are computed differently in training. fastaccum tries a loss: it compares the loss of a
# micro-batch with the losses of its parts

def hardest(p, y, *, trains):
    "Return the mean loss of the samples, or if `trains(p, losses)`, that of the half with larger losses"
    losses = F.cross_entropy(p, y, reduction='none')
    return losses.topk(max(1, len(y)//2)).values.mean() if trains(p, losses) else losses.mean()

@pytest.mark.parametrize('trains', [lambda p, losses: p.requires_grad, lambda p, losses: losses.requires_grad,
    lambda p, losses: torch.is_grad_enabled()])
def test_a_loss_is_tried_as_in_training(trains):
    "The loss recognizes training by gradients that are required, or by torch's grad mode"
    warned,a,b = warnings_and_runs(loss_func=partial(hardest, trains=trains))
    assert warned=={not_a_mean:1} and weights_apart(a, b)>1e-4

def test_a_loss_may_write_into_the_predictions_that_it_is_tried_on():
    def in_place(p, y): return F.cross_entropy(p.mul_(2) if p.requires_grad else p*2, y)
    warned,a,b = warnings_and_runs(loss_func=in_place)
    assert not warned and weights_apart(a, b)<1e-7

# Counters of steps

class SetsRate(Callback):
    "Sets the learning rate according to the number of steps that were taken"
    def before_step(self): self.opt.set_hyper('lr', 0.1/(1+self.train_iter))

def test_callbacks_count_steps_where_every_micro_batch_is_recorded():
    steps = RecordAt('before_batch', lambda l: l.train_iter)
    def run(bs, *cbs):
        learn = toy(bs)
        learn.fit(2, 0.1, cbs=[SetsRate(),*cbs])
        return learn
    a,b = run(16),run(4, steps, GradientAccumulation(16, log_accum_batch=False))
    assert (a.train_iter,b.train_iter)==(10,10) and weights_apart(a, b)<1e-9
    assert steps.values==[i//4 for i in range(18)]+[5+i//4 for i in range(18)]
    assert len(b.recorder.losses)==36

def test_callbacks_that_record_every_micro_batch_count_micro_batches():
    "Such callbacks run after the Recorder, as loggers do"
    rows = RecordAt('after_batch', lambda l: l.train_iter, order=51)
    toy(4).fit(2, 0.1, cbs=[rows,GradientAccumulation(16, log_accum_batch=False)])
    assert rows.values==list(range(1, 37))

# Rare mistakes that are refused

def second_size(value):
    "Return a function `n_items` that returns a tensor: 4 in its first call, and `value` in later calls"
    calls = []
    def n_items(learn):
        calls.append(learn)
        return torch.tensor(4. if len(calls)==1 else value)
    return n_items

@pytest.mark.parametrize('value', [float('nan'),-1.,float('inf')])
def test_every_tensor_that_n_items_returns_on_a_cpu_is_checked(value):
    with pytest.raises(ValueError, match='`n_items` must return a finite number'):
        toy(4).fit(1, 0.1, cbs=GradientAccumulation(16, n_items=second_size(value)))

def wrong_split(before, after):
    "Return a `split` function with `before` rows too many in front, and `after` too many at the end"
    return lambda b, start, stop, n: [o[max(0, start-before):stop+after] for o in b]

@pytest.mark.parametrize('split,words', [(wrong_split(0, -1),'returned targets of shape .*first dimension should be'),
    (wrong_split(1, 0),'returned targets of shape'),
    (lambda *_: None,'`split` must return a tuple or list.*got NoneType')])
def test_a_split_that_returns_other_rows_is_refused_before_a_weight_moves(split, words):
    learn = toy(16)
    with weights_unchanged(learn), pytest.raises((ValueError,TypeError), match=f'(?s){words}.*#cannot-be-split'):
        size = AutoSize(split)
        size.max_train = 4
        learn.fit(1, 0.1, cbs=GradientAccumulation(16, micro_batch_size=size))

class OwnEpoch(Learner):
    "A Learner whose own `_do_epoch_train` iterates over the training loader"
    def _do_epoch_train(self):
        self.dl,self.n_iter = self.dls.train,len(self.dls.train)
        self('before_train')
        for i,b in enumerate(self.dls.train): self.one_batch(i, b)

class OwnLoopThatReads(Learner):
    "A Learner whose own `all_batches` reads each batch before it passes the batch to `one_batch`"
    def all_batches(self):
        self.n_iter = len(self.dl)
        for i,b in enumerate(self.dl): self.one_batch(i, b) if len(b) else None

class OwnLoop(Learner):
    "A Learner whose own `all_batches` only passes each batch to `one_batch`"
    def all_batches(self):
        self.n_iter = len(self.dl)
        for i,b in enumerate(self.dl): self.one_batch(i, b)

def toy_of_class(cls, *args, **kwargs):
    learn = toy(*args, **kwargs)
    learn.__class__ = cls
    return learn

def replace_loader(learn): learn.dl = learn.dls.train

@pytest.mark.parametrize('cls,cbs,words', [(OwnEpoch,[],'let it iterate over `self.dl`'),
    (Learner,[CallAt('before_train', replace_loader, order=13)],'give it an `order` below 12'),
    (Learner,[CallAt('before_train', lambda l: l.epoch and replace_loader(l), order=13)],'give it an `order` below 12'),
    (OwnLoopThatReads,[],'only pass each item on to `one_batch`')])
def test_a_training_loop_that_bypasses_the_steps_is_refused(cls, cbs, words):
    with pytest.raises((RuntimeError,TypeError), match=words):
        toy_of_class(cls, 4).fit(2, 0.1, cbs=[GradientAccumulation(16),*cbs])

def test_a_learner_may_have_its_own_all_batches_and_a_callback_may_replace_the_loader():
    first = CallAt('before_train', replace_loader, order=5)   # runs before fastaccum wraps the loader
    assert_same_run(*both_runs(make=partial(toy_of_class, OwnLoop), cbs=lambda: [first]))

def fit_with(*cbs, learn=toy, **kwargs):
    return learn(**dict(bs=4)|kwargs).fit(1, 0.1, cbs=[GradientAccumulation(16),*cbs])

def fails(pos): return 1//0

@pytest.mark.parametrize('f,words', [
    (lambda: GradientAccumulation(16).plan(toy(4).dls, None), '`n_epoch` must be a whole number of epochs, got None'),
    (lambda: GradientAccumulation(16).plot_sched(toy(4).dls, 0), '`n_epoch` must be at least 1, got 0'),
    (lambda: GradientAccumulation(128, drop_last=True).plot_sched(toy(4).dls), 'too few for a step of 128'),
    (lambda: toy(4).fit('a', cbs=GradientAccumulation(16)), "`n_epoch` must be a whole number of epochs, got 'a'"),
    (lambda: GradientAccumulationSchedule(10**400, 16), '`schedule` raised OverflowError .* at progress 0,'),
    (lambda: GradientAccumulationSchedule(4, 16, schedule=fails), 'ZeroDivisionError .* at progress 0,'),
    (lambda: fit_with(FreezeBN(lambda m: 4)), '`part` must return a module.* an object of type int'),
    (lambda: ActivationCheckpoint(lambda: nn.Linear), '`segments` must be a function that takes 1 argument'),
    (lambda: toy(4).accum_find(lr='x'), "`lr` must be a finite number.*got 'x'"),
    (lambda: toy(4).accum_find(lr=float('nan')), '`lr` must be a finite number.*got nan'),
    (lambda: toy(4).accum_find(10**6), '`accum_bs=1000000` is more than the 70 samples'),
    (lambda: toy(4).bs_find(show_plot='x'), "`show_plot` must be True or False, got 'x'"),
    (lambda: NoiseScale(every=0), '`every` must be at least 1, got 0'),
    *[(lambda bs=bs: fit_with(learn=partial(with_bs, of_loader=bs)), f'must be at least 1, got {bs}')
        for bs in (0,-4)]])
def test_bad_arguments_are_refused_with_a_link(f, words):
    with pytest.raises((TypeError,ValueError), match=f'(?s){words}.*reference/messages.html#'): f()

def with_bs(of_loader, **kwargs):
    "Return a Learner whose loader has an attribute `bs` of this value"
    learn = toy(**kwargs)
    learn.dls.loaders[0] = WrongLength(66, 4, 17)
    learn.dls.train.bs = of_loader
    return learn

# Warnings that were false

def test_the_hyper_parameters_that_scaledlr_keeps_are_not_taken_for_a_second_optimizer():
    learn = toy(4, cbs=[GradientAccumulation(16),ScaledLR(base_bs=16)])
    warned = count_warnings(lambda: [learn.fit(1, 0.01, reset_opt=True) for _ in range(2)])
    assert not warned

# Interrupts

def interrupted(make, at):
    """Call `make(learn)`, and interrupt it where fastaccum enters or leaves `torch.no_grad`

    Return whether there was an interrupt, and whether gradients are on afterwards.
    """
    n = 0
    ends = torch.no_grad.__exit__.__code__,torch.no_grad.__enter__.__code__
    def trace(frame, event, arg):
        nonlocal n
        if frame.f_code not in ends or not _is_ours(frame): return
        n += 1
        if n==at+1: raise KeyboardInterrupt
    learn,old = toy(4, n=22),sys.gettrace()
    sys.settrace(trace)
    try: make(learn)
    except KeyboardInterrupt: pass
    finally: sys.settrace(old)
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return n>at,on

package = os.path.join(os.path.dirname(fastaccum.__file__), '')   # this path ends with a separator

def _is_ours(frame):
    "Return whether fastaccum called this frame, directly or through a decorator of torch"
    for _ in range(2):
        frame = frame.f_back
        if frame.f_code.co_filename.startswith(package): return True
    return False

fits = dict(checkpoints=lambda l: l.fit(1, 0.1, cbs=ActivationCheckpoint(nn.Linear)),
    accumulated=lambda l: l.fit(1, 0.1, cbs=[GradientAccumulation(8),ActivationCheckpoint(nn.Linear)]),
    split=lambda l: l.fit(1, 0.1, cbs=GradientAccumulation(8, micro_batch_size=1)),
    finder=lambda l: l.add_cbs([GradientAccumulation(8),FreezeBN()]).lr_find(num_it=4, show_plot=False))

@pytest.mark.parametrize('nm', fits)
def test_an_interrupt_leaves_gradients_on(nm):
    for at in range(40):
        was_interrupted,gradients_on = interrupted(fits[nm], at)
        assert gradients_on, at
        if not was_interrupted: break
