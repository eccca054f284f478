"""Arguments and Learners with which a fit cannot work are refused before a weight changes.

The message names the bad value and says what to type instead. Later fits without accumulation are those
of fastai.
"""
import numpy as np, pytest, torch
from functools import partial
from torch import nn
from fastai.vision.all import (DataLoader, GradientAccumulation as FastaiGradientAccumulation, Learner,
    NonNativeMixedPrecision, ProgressCallback)
from fastaccum import (ActivationCheckpoint, AutoSize, FreezeBN, GradientAccumulation, GradientAccumulationSchedule,
    GradientAccumulationScheduler, GradientCache, NoiseScale, RecalibrateBN, ScaledLR)
from fastaccum.testing import assert_same_run, toy, toy_data
from common import RecordAt, weights

def entry_of(e):
    "Return the entry of the page Messages to which the error links"
    return str(e.value).rpartition('\nMore: https://')[2].partition('.html#')[2]

# Arguments

Schedule,Scheduler = partial(GradientAccumulationSchedule, 8, 32),GradientAccumulationScheduler
# functions that take a whole number, by the name of the argument
counts = dict(accum_bs=GradientAccumulation, n_acc=GradientAccumulation, start_accum_bs=partial(
    GradientAccumulationSchedule, final_accum_bs=8), final_accum_bs=partial(GradientAccumulationSchedule, 8),
    base_bs=ScaledLR, every=NoiseScale, bs=RecalibrateBN, n=lambda **kw: toy(4).recalibrate_bn(**kw),
    steps=lambda **kw: toy(4).accum_find(**kw),
    **dict.fromkeys(('steps_per_trial','init_val','max_trials'), lambda **kw: toy(4).bs_find(**kw)))
sizes = dict(accumulation=GradientAccumulation, schedule=Schedule, scheduler=partial(Scheduler, {0:2}),
    cache=GradientCache)
named_arguments = [*counts.items(), *[('micro_batch_size',f) for f in sizes.values()]]

@pytest.mark.parametrize('n', [0, -8, 64., '64', True, [64], torch.tensor(64), float('nan')], ids=repr)
@pytest.mark.parametrize('nm,f', named_arguments, ids=[*counts, *sizes])
def test_a_value_that_is_no_whole_number_is_refused_when_it_is_given(nm, f, n):
    with pytest.raises(ValueError if type(n) is int else TypeError, match=f'`{nm}` must be') as e: f(**{nm:n})
    assert f'got {n!r}' in str(e.value) and entry_of(e)

@pytest.mark.parametrize('nm', ['accum_bs','n_acc'])
def test_whole_numbers_of_any_type_are_accepted_by_either_name(nm):
    acc = GradientAccumulation(**{nm:np.uint8(64)})
    assert acc.accum_bs==acc.n_acc==64 and GradientAccumulation().accum_bs==32
    setattr(acc, nm, 8)
    for bad in (0, '8'):
        with pytest.raises((TypeError,ValueError), match='`accum_bs` must be'): setattr(acc, nm, bad)
    assert acc.accum_bs==acc.n_acc==8
    with pytest.raises(AttributeError, match='=16.*computes the size of each step'): setattr(Schedule(), nm, 16)

two = lambda learn, n: n
# Each case: a function, its arguments, the error, and words of its message
bad = [(GradientAccumulation, dict(micro_batch_size='big'), TypeError,
        "'auto', an `AutoSize`, a `TokenBudget`, or a whole number"),
    *[(GradientAccumulation, dict(accum_bs=o), TypeError, 'write `64`') for o in ('64',64.)],
    (GradientAccumulation, dict(accum_bs='auto'), TypeError, "got 'auto' .*Did you mean `micro_batch_size='auto'`"),
    *[(f, {nm:v}, TypeError, f'`{nm}` must be True.*got {v!r}') for f in (GradientAccumulation,Schedule)
        for nm,v in dict(drop_last='no', log_accum_batch=0).items()],
    *[(GradientAccumulation, dict(n_items=o), TypeError, '`n_items` must be a function')
      for o in (4, 'len', two, lambda: 4)],
    (GradientAccumulation, dict(accum_bs=64, n_acc=128), ValueError, '`accum_bs=64` and `n_acc=128`.*pass one'),
    *[(GradientAccumulation, {o:4}, TypeError, f'no argument `{o}`. Did you mean `{meant}=`') for o,meant in
        dict(acum_bs='accum_bs', n_batch='n_batches', accum_steps='n_batches', batch_size='accum_bs').items()],
    *[(Schedule, o, ValueError, 'start=.*finish=.*pass a `finish`') for o in (dict(start=.5, finish=.2),
        dict(start=3, finish=2))],
    *[(Schedule, dict(finish=o), TypeError, f'`finish` must be a fraction.*got {o!r}') for o in ('1', True)],
    *[(Schedule, dict(start=o), ValueError, f'start={o}.*pass a fraction') for o in (-1, float('nan'))],
    *[(Schedule, dict(schedule=o), TypeError, 'schedule.*pass an annealer') for o in ('cos', dict)],
    *[(Schedule, dict(schedule=lambda p, o=o: o), ValueError, 'at progress.*number of samples')
        for o in (float('inf'), -8, None)],
    *[(Scheduler, dict(scheduling=o), TypeError, 'must be a dict') for o in ({}, [2])],
    *[(Scheduler, dict(scheduling=o), TypeError, 'use ints for all keys') for o in ({.5:2}, {0:2.}, {True:2})],
    (Scheduler, dict(scheduling={-1:2}), IndexError, '-1.*from 0'),
    (Scheduler, dict(scheduling={0:0}), ValueError, 'at least 1 micro-batch'),
    (Scheduler, dict(scheduling={0:2}, mode='batch'), ValueError, "`mode` must be 'epoch' or 'step', got 'batch'"),
    (GradientCache, dict(micro_batch_size=4, split=4), TypeError, '`split` must be a function.*got 4'),
    *[(AutoSize, dict(split=o), TypeError, '`split` must be a function that takes 4 arguments')
        for o in ('auto', lambda b,start,stop: b)],
    *[(ActivationCheckpoint, dict(segments=o), TypeError, '`segments` got a.*pass a class')
        for o in (4, [], ['1'], [nn.Linear(1, 1),3], [None], {})],
    (toy(4).bs_find, dict(mode='linear'), ValueError, "`mode` must be.*got 'linear'"),
    (toy(4).bs_find, dict(apply=1), TypeError, '`apply` must be True or False, got 1'),
    (FreezeBN, dict(part=4), TypeError, '`part` must be a function.*got 4'),
    (ScaledLR, dict(base_bs=8, rule='cubic'), ValueError, "`rule` must be 'linear' or 'sqrt', got 'cubic'"),
    (ScaledLR, dict(base_bs=8, rule='adascale'), ValueError, "rule='adascale'.*was removed.*'linear'.*'sqrt'")]

@pytest.mark.parametrize('f,kwargs,exc,words', bad, ids=[', '.join(o[1]) for o in bad])
def test_other_arguments_are_refused_when_they_are_given(f, kwargs, exc, words):
    with pytest.raises(exc, match=words) as e: f(**kwargs)
    # only messages of Python itself have no link
    assert entry_of(e) or 'unexpected keyword' in str(e.value)

# Learners

class OwnLoop(Learner):
    "A Learner with its own `_do_one_batch`, which might take a step itself"
    def _do_one_batch(self): super()._do_one_batch()

class HalfGradients(NonNativeMixedPrecision):
    "fastai's callback without its `before_fit`, which fails on a CPU"
    def before_fit(self): pass

class TakesDictOfTargets(nn.Module):
    "A loss with an `ignore_index`, whose targets may be a dict"
    ignore_index = -100
    def forward(self, p, y): return nn.functional.cross_entropy(p, y['y'] if isinstance(y, dict) else y)

def changed(f):
    "Return a function that makes a toy Learner and changes it by `f(learn)`"
    def make(**kwargs):
        learn = toy(**kwargs)
        f(learn)
        return learn
    return make
hooked = changed(lambda l: l.model[2].weight.register_post_accumulate_grad_hook(lambda p: None))
own_loop = changed(lambda l: setattr(l, '__class__', OwnLoop))
ready_made = changed(lambda l: l.dls.loaders.__setitem__(0, DataLoader(list(l.dls.train), bs=None)))
named = partial(toy, loss_func=TakesDictOfTargets(), data=[(x,dict(y=y)) for x,y in toy_data(70)])

acc,fastais = GradientAccumulation,FastaiGradientAccumulation
# Each case: functions that make a Learner and callbacks, the error, and words of its message
refused = dict(
    two=(toy, lambda: [acc(16),acc(8)], ValueError, '2 callbacks accumulate.*keep one'),
    fastais_too=(toy, lambda: [fastais(16),acc(8)], ValueError, '2 callbacks accumulate.*keep one'),
    # the message does not begin with the name of the callback that checks this
    added_up_in_half_precision=(toy, lambda: [HalfGradients(),acc(8)], ValueError, r'^NonNative.*to_fp16\(\)'),
    steps_in_backward=(hooked, lambda: [acc(8)], ValueError, "'2.weight' has a hook.*use another optimizer"),
    steps_by_itself=(own_loop, lambda: [acc(8)], ValueError, 'own `_do_one_batch`.*into a callback'),
    no_step=(toy, lambda: [acc(80, drop_last=True)], ValueError, '70 samples, too few.*80.*drop_last'),
    larger_than_the_loaders=(toy, lambda: [acc(16, micro_batch_size=8)], ValueError, 'size=8.*the 4 samples.*`bs=8`'),
    no_batch_size=(ready_made, lambda: [acc(16)], ValueError, 'such as `fastaccum.Grad.*micro_batch_size=16'),
    targets_not_counted=(named, lambda: [acc(16)], TypeError, 'target is a dict and not a tensor.*pass `n_items='),
    start_after_finish=(toy, lambda: [Schedule(start=100)], ValueError, '`start=100` is later.*pass a `finish`'),
    nothing_to_measure=(toy, lambda: [NoiseScale()], ValueError, 'add `fastaccum.GradientAccumulation'),
    two_meters=(toy, lambda: [acc(8),NoiseScale(),NoiseScale()], ValueError, '2 NoiseScale.*keep one'),
    two_rates=(toy, lambda: [acc(8),ScaledLR(base_bs=8),ScaledLR(base_bs=8)], ValueError, '2 ScaledLR.*keep one'),
    two_caches=(toy, lambda: [GradientCache(micro_batch_size=o) for o in (2,4)], ValueError, 'keep one'),
    split_and_cached=(toy, lambda: [acc(8, micro_batch_size=2),GradientCache(micro_batch_size=2)], ValueError,
        'by `micro_batch_size=2`.*`GradientCache` only'))
# the first batch shows the mistake; others show before the fit
late = {'steps_by_itself','targets_not_counted'}
for nm,f in dict(below=lambda l: -1, infinite=lambda l: float('inf'), text=lambda l: '4', many=lambda l: l.y).items():
    refused[f'size_{nm}'] = toy,lambda f=f: [acc(8, n_items=f)],(TypeError,ValueError),'`n_items` must return a'
    late.add(f'size_{nm}')
refused['size_zero'] = toy,lambda: [acc(8, n_items=lambda l: 0)],ValueError,'`n_items` returned 0 for a micro-batch'
late.add('size_zero')

@pytest.mark.parametrize('nm', refused)
def test_learners_that_cannot_be_trained_are_refused_before_a_weight_changes(nm):
    make,cbs,exc,words = refused[nm]
    learn,fresh = make(bs=4, n=70),make(bs=4, n=70)
    learn.add_cb(ProgressCallback())
    before,logger,own = weights(learn),learn.logger,cbs()
    with pytest.raises(exc, match=words) as e: learn.fit(1, 0.1, cbs=own)
    assert entry_of(e)
    if nm in late: learn.logger = logger   # after an error, fastai leaves a changed logger
    else:
        with pytest.raises(exc, match=words), learn.added_cbs(own): learn.lr_find(show_plot=False)
    assert learn.logger is logger and weights(learn).equal(before)
    learn.remove_cbs([*own,ProgressCallback])
    for o in (fresh,learn): o.fit(1, 0.1)
    assert_same_run(fresh, learn)

def test_accumulation_cannot_be_switched_off_in_the_middle_of_an_epoch():
    off = RecordAt('after_step', lambda l: setattr(l.gradient_accumulation, 'run', False))
    with pytest.raises(RuntimeError, match='during an epoch'): toy(4).fit(1, cbs=[GradientAccumulation(16),off])
