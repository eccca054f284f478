"Schedules: the run is plain training on exactly the macro-batches of the plan, and the plan is what the schedule says."
import pickle, random, warnings
import numpy as np, pytest
from functools import partial
from hypothesis import given, settings, strategies as st
from fastai.callback.core import CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.schedule import SchedCos, SchedExp, SchedLin, SchedNo, SchedPoly, combine_scheds
from fastai.callback.training import GradientClip
from fastai.optimizer import Adam, SGD
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.core.macro_batch import Position, round_up
from fastaccum.testing import assert_twins, toy
from common import Raise, Seen, weights
from test_precision import Scaled

class MacroLoader:
    "A loader that yields, epoch by epoch, batches of the given sizes"
    def __init__(self, dl, sizes, epoch=0): self.dl,self.sizes,self.epoch,self.device = dl,sizes,epoch,dl.device
    def __len__(self): return len(self.sizes[self.epoch%len(self.sizes)])
    def __iter__(self):
        idxs,start = self.dl.get_idxs(),0
        sizes = self.sizes[self.epoch%len(self.sizes)]
        self.epoch += 1
        for size in sizes:
            yield self.dl.create_batch([self.dl.dataset[i] for i in idxs[start:start+size]])
            start += size

def one_cycle(learn, n_epoch, cbs, **kwargs): learn.fit_one_cycle(n_epoch, 0.05, cbs=cbs, **kwargs)

def compare(make_acc, n_epoch, n, micro, fit=one_cycle, cbs=list, start_epoch=0, **kwargs):
    "Train on the plan's macro-batches, and with accumulation; return both Learners"
    a,b,acc = toy(1, n=n, **kwargs),toy(micro, n=n, **kwargs),make_acc()
    plan = acc.plan(b.dls, n_epoch)
    a.dls.loaders[0] = MacroLoader(a.dls.train, plan.sizes, start_epoch)
    more = dict(start_epoch=start_epoch) if start_epoch else {}
    fit(a, n_epoch, cbs(), **more); fit(b, n_epoch, [acc]+cbs(), **more)
    assert_twins(a, b)
    assert len(b.recorder.losses)==len(b.recorder.accum_bs)==sum(plan.steps[start_epoch:])
    return a,b,plan

annealers = dict(lin=SchedLin, cos=SchedCos, exp=SchedExp, no=SchedNo, poly=partial(SchedPoly, power=2),
    own=lambda a,b: lambda pos: a if pos<0.4 else b)

@pytest.mark.parametrize('annealer', annealers)
@pytest.mark.parametrize('ends', [(8,40),(40,8),(5,33)], ids=str)
@pytest.mark.parametrize('drop_last', [False,True])
def test_annealed_run_is_plain_training_on_its_macro_batches(annealer, ends, drop_last):
    acc = lambda: GradientAccumulationSchedule(*ends, start=0.1, finish=0.8,
        schedule=annealers[annealer], drop_last=drop_last)
    compare(acc, n_epoch=3, n=71, micro=4)

@pytest.mark.parametrize('seed', range(60))
def test_random_schedules(seed):
    "All sorts at once: random ends, windows, annealers, modes, data, optimizers, clipping, loss scaling"
    r = random.Random(seed)
    micro,n,n_epoch = r.randint(1, 7),r.randint(30, 90),r.randint(1, 4)
    drop_last = r.random()<0.3
    most = n//(2*micro)*micro
    if r.random()<0.6:
        start,finish = sorted([r.random(),r.random()] if r.random()<0.6 else
            [r.randint(0, n_epoch),r.randint(0, n_epoch)])
        ends = r.randint(1, most),r.randint(1, most)
        acc = lambda: GradientAccumulationSchedule(*ends, start=start, finish=finish,
            schedule=annealers[r2.choice(list(annealers))], drop_last=drop_last)
    else:
        mode = r.choice(['epoch','step'])
        scheduling = {r.randint(0, n_epoch if mode=='epoch' else 20):r.randint(1, max(1, most//micro))
            for _ in range(3)}
        acc = lambda: GradientAccumulationScheduler(scheduling, mode, drop_last=drop_last)
    r2 = random.Random(seed)
    more = [GradientClip(0.05)]*(r.random()<0.3)+[Scaled(init_scale=2.**8, growth_interval=3)]*(r.random()<0.3)
    compare(acc, n_epoch, n, micro, cbs=lambda: list(more), tokens=r.random()<0.3, shuffle=r.random()<0.5,
        opt_func=r.choice([SGD,Adam]), seed=seed)

@given(n=st.integers(20, 300), micro=st.integers(1, 9), a=st.integers(1, 60), b=st.integers(1, 60),
       s=st.floats(0, 1), f=st.floats(0, 1),
       name=st.sampled_from(['lin','cos','exp','no','poly']), n_epoch=st.integers(1, 4), drop=st.booleans())
@settings(max_examples=200, deadline=None)
def test_sizes_follow_the_ideal_curve(n, micro, a, b, s, f, name, n_epoch, drop):
    """Within half a micro-batch of the annealer between the rounded-up ends; each sample once per epoch, but for
    `drop_last`"""
    s,f = sorted([s,f])
    acc = GradientAccumulationSchedule(a, b, start=s, finish=f, schedule=annealers[name], drop_last=drop)
    first,last = round_up(a, micro),round_up(b, micro)
    size = acc.sizes(micro, n_epoch)
    for i in range(101):
        pct = i/100
        ideal = last if pct>=f else first if pct<=s else annealers[name](first, last)((pct-s)/(f-s))
        got = size(Position(0, 0, pct))
        assert got%micro==0 and got>=micro and abs(got-ideal)<=micro/2+1e-9
    assert size(Position(0, 0, 0.))==(last if f==0 else first) and size(Position(0, 0, 1.))==last
    from fastaccum.core.plan import Plan
    plan = Plan(n, micro, size, n_epoch, drop)
    for epoch,sizes in enumerate(plan.sizes):
        if not drop: assert sum(sizes)==n
        else:
            assert sum(sizes)<=n
            assert sum(sizes)==n or sum(sizes)+size(Position(epoch, 0, (epoch+sum(sizes)/n)/n_epoch))>n
        assert all(o%micro==0 for o in sizes[:-1])

@pytest.mark.parametrize('start,finish,pcts',
    [(1,3,(0.25,0.75)), (0.25,3,(0.25,0.75)), (1,0.75,(0.25,0.75)), (0,4,(0.,1.)), (2,2,(0.5,0.5))], ids=str)
def test_epochs_and_fractions_at_both_ends(start, finish, pcts):
    make = lambda s,f: GradientAccumulationSchedule(8, 32, start=s, finish=f)
    dls = toy(4, n=64).dls
    assert make(start, finish).plan(dls, 4).sizes==make(*pcts).plan(dls, 4).sizes

def test_a_ready_made_schedule():
    sched = combine_scheds([0.5,0.5], [SchedLin(8,32), SchedLin(32,16)])
    a,b,plan = compare(lambda: GradientAccumulationSchedule(8, 16, finish=1., schedule=sched), n_epoch=4, n=64, micro=4)
    assert max(b.recorder.accum_bs)>=28 and plan.sizes[0][0]==8 and b.recorder.accum_bs[-1]<24

def test_resuming_a_second_fit_and_a_restored_callback():
    """The same sizes on `start_epoch`, in another fit with the same callback, after an interrupt, and pickled and
    restored"""
    make = lambda: GradientAccumulationSchedule(8, 32, start=1, finish=3, schedule=partial(SchedPoly, power=2))
    a,b,plan = compare(make, n_epoch=4, n=70, micro=4, start_epoch=2)
    expected = toy(4, n=70)
    expected.fit_one_cycle(4, 0.05, cbs=make())
    assert b.recorder.accum_bs==expected.recorder.accum_bs[sum(plan.steps[:2]):]
    acc,learn = make(),toy(4, n=70)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(4, 0.05, cbs=[acc,Raise('after_backward', KeyboardInterrupt, 7, at=20)])
    for o in (acc,acc,pickle.loads(pickle.dumps(acc))):
        learn = toy(4, n=70)
        learn.fit_one_cycle(4, 0.05, cbs=o)
        assert learn.recorder.accum_bs==expected.recorder.accum_bs
        assert_twins(expected, learn)

def test_growing_in_the_middle_of_an_epoch_keeps_no_stale_gradients():
    "Where the factor is looked up with a modulo of the batch index, half a macro-batch of old gradients stays behind"
    sizes = Seen('before_step', lambda l: l.gradient_accumulation.macro.samples)
    a,b,plan = compare(lambda: GradientAccumulationScheduler({0:2, 3:5, 5:3}, mode='step'), n_epoch=2, n=64, micro=2)
    assert plan.sizes[0][:6]==[4,4,4,10,10,6]
    toy(2, n=64).fit(1, 0.05, cbs=[GradientAccumulationScheduler({0:2, 3:5, 5:3}, mode='step'),sizes])
    assert sizes.values==plan.sizes[0]

def test_scheduler_by_epoch():
    a,b,plan = compare(lambda: GradientAccumulationScheduler({1:2, 3:4}), n_epoch=5, n=64, micro=4)
    assert plan.steps==[16,8,8,4,4]

def test_thresholds_in_any_order():
    assert GradientAccumulationScheduler({3:4, 1:2}).plan(toy(4, n=64).dls, 5).steps==[16,8,8,4,4]

def test_an_annealer_that_dips_below_a_micro_batch():
    "At least one micro-batch makes a step, whatever the annealer says"
    dip = lambda a,b: lambda pos: 1
    a,b,plan = compare(lambda: GradientAccumulationSchedule(16, 16, finish=1., schedule=dip), n_epoch=2, n=64, micro=4)
    assert plan.sizes==[[16]+[4]*12,[4]*16]

def test_sizes_are_recorded_anew_in_each_fit():
    acc,learn = GradientAccumulationSchedule(8, 16),toy(4, n=64)
    for _ in range(2):
        learn.fit(2, 0.05, cbs=acc)
        assert len(learn.recorder.accum_bs)==len(learn.recorder.losses)

def test_scheduler_by_step_counts_over_the_whole_fit():
    acc = lambda: GradientAccumulationScheduler({20:2, 24:4}, mode='step')
    a,b,plan = compare(acc, n_epoch=3, n=64, micro=4)
    assert plan.sizes==[[4]*16,[4]*4+[8]*4+[16],[16]*4]
    a,b,_ = compare(acc, n_epoch=3, n=64, micro=4, start_epoch=1)
    assert b.recorder.accum_bs==[4]*4+[8]*4+[16]*5

def test_plain_accumulation_has_a_plan_too():
    acc = GradientAccumulation(16)
    learn = toy(4, n=70)
    assert acc.plan(learn.dls, 2).sizes==[[16,16,16,16,6]]*2

def test_lr_find_uses_the_first_size():
    a,b = toy(8, n=64),toy(4, n=64, cbs=GradientAccumulationSchedule(8, 32))
    for o in (a,b): o.lr_find(num_it=30, show_plot=False, stop_div=False)
    assert b.recorder.accum_bs==[8]*30
    assert_twins(a, b)

def test_shadowed_names_and_warnings():
    "Other callbacks find either schedule where they find the plain callback; nothing warns"
    for acc in (GradientAccumulationSchedule(8, 32), GradientAccumulationScheduler({0:2})):
        found = Seen('before_fit', lambda l: l.gradient_accumulation is acc)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            toy(4, n=64).fit(2, 0.05, cbs=[acc,found])
        assert found.values==[True]

@pytest.mark.parametrize('kwargs', [dict(finish=1.5), dict(start=1.2, finish=2.), dict(finish=4),
    dict(start=3, finish=5)], ids=str)
def test_finish_after_the_end_warns(kwargs):
    learn = toy(4, n=64)
    with pytest.warns(UserWarning, match='size stops at') as w:
        learn.fit(2, 0.05, cbs=GradientAccumulationSchedule(8, 32, **kwargs))
    assert learn.recorder.accum_bs[-1]<32 and str(kwargs['finish']) in str(w[0].message)

@pytest.mark.parametrize('kwargs,exc,msg', [
    (dict(start=0.5, finish=0.3), ValueError, '`start=0.5` is later'),
    (dict(start=3, finish=2), ValueError, '`start=3` is later'),
    (dict(start=-0.1), ValueError, 'start=-0.1'), (dict(finish=-1), ValueError, 'finish=-1'),
    (dict(start=True), TypeError, 'start=True'), (dict(finish=10**400), ValueError, 'finish=1000'),
    (dict(finish='1'), TypeError, "finish='1'"), (dict(finish=float('nan')), ValueError, 'nan'),
    (dict(start_accum_bs=0), ValueError, 'start_accum_bs=0'),
    (dict(final_accum_bs=-4), ValueError, 'final_accum_bs=-4'),
    (dict(start_accum_bs=4.), TypeError, 'start_accum_bs=4.0'),
    (dict(schedule='cos'), TypeError, "'cos'"), (dict(schedule=None), TypeError, 'None'),
    (dict(schedule=lambda a,b: a), TypeError, 'returned 8'),
    (dict(schedule=lambda a,b: lambda pos: -1), ValueError, 'above 0'),
    (dict(schedule=lambda a,b: lambda pos: float('nan')), ValueError, 'nan'),
    (dict(drop_last=1), TypeError, 'drop_last=1'), (dict(size=3), TypeError, 'size=3')], ids=str)
def test_bad_schedules_fail_in_the_constructor(kwargs, exc, msg):
    with pytest.raises(exc, match=msg):
        GradientAccumulationSchedule(**{**dict(start_accum_bs=8, final_accum_bs=32), **kwargs})

@pytest.mark.parametrize('args,exc,msg', [(({},), TypeError, 'give a dict'), (([2,4],), TypeError, 'give a dict'),
    (({0.5:2},), TypeError, '0.5'),
    (({0:2.},), TypeError, '2.0'), (({True:2},), TypeError, 'True'), (({0:0},), ValueError, 'factor 0'),
    (({-1:2},), IndexError, 'threshold -1'),
    (({0:2},'batch'), ValueError, "'batch'")], ids=str)
def test_bad_scheduling_fails_in_the_constructor(args, exc, msg):
    with pytest.raises(exc, match=msg): GradientAccumulationScheduler(*args)

def test_mixed_moments_out_of_order_fail_before_a_weight_moves():
    learn = toy(4, n=64)
    before = weights(learn)
    with pytest.raises(ValueError, match='`start=1` is later than `finish=0.3`'):
        learn.fit(2, 0.05, cbs=GradientAccumulationSchedule(8, 32, start=1))
    assert weights(learn).equal(before)

def test_plot_sched_draws_the_plan():
    import matplotlib.pyplot as plt
    acc,dls = GradientAccumulationSchedule(8, 32, finish=2),toy(4, n=70).dls
    axs = acc.plot_sched(dls, 3)
    plan = acc.plan(dls, 3)
    sizes = [o for epoch in plan.sizes for o in epoch]
    assert list(axs[0].lines[0].get_ydata())[:-1]==sizes
    assert list(axs[1].lines[0].get_ydata())==list(range(len(sizes)+1))
    plt.close('all')

def test_numpy_integers_do_not_overflow():
    "4*np.int8(64) is 0, and a macro-batch of 0 samples would never end an epoch"
    assert GradientAccumulationScheduler({0:np.int8(64)}).sizes(4, 1)(Position(0, 0, 0.))==256

@pytest.mark.parametrize('exc', [KeyboardInterrupt,RuntimeError,CancelFitException,CancelEpochException,
    CancelTrainException], ids=lambda o: o.__name__)
@pytest.mark.parametrize('make', [lambda: GradientAccumulationSchedule(4, 12),
    lambda: GradientAccumulationScheduler({0:2, 3:5}, mode='step')], ids=['schedule','scheduler'])
def test_faults(exc, make):
    "The foundation's fault matrix, with schedules"
    from test_faults import (check_accumulated, check_clean, check_plain, faulty_fit, n, micro, orders, per_batch,
        per_fit)
    for i,event in enumerate(per_fit+per_batch):
        for j,order in enumerate(orders[::2]):
            learn = toy(micro, n=n)
            fault = Raise(event, exc, order, at=(i+j)%2 if event in per_fit else (i+j)%5)
            faulty_fit(learn, fault, make(), permanent=(i+j)%2)
            check_clean(learn)
            (check_plain if i%2 else check_accumulated)(learn)
