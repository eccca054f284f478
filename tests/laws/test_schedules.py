"A fit with a schedule is the run on batches of the sizes in `plan()`, which follow the schedule."
import matplotlib.pyplot as plt, numpy as np, pickle, pytest, random
from functools import partial
from hypothesis import given, strategies as st
from fastai.vision.all import (Adam, DataLoader, GradientClip, SGD, SchedCos, SchedExp, SchedLin, SchedNo, SchedPoly,
    combine_scheds)
from fastaccum import (GradientAccumulation, GradientAccumulationSchedule as Schedule,
    GradientAccumulationScheduler as Scheduler)
from fastaccum.testing import assert_same_run, toy
from common import BatchSizesLoader, RaiseAt, pick_cases

def compare(make, n_epoch, n, micro, cbs=list, start_epoch=0, **kwargs):
    """Fail if the schedule differs from training on batches of the planned sizes

    Return Learners and plan.
    """
    a,b,acc = toy(1, n=n, **kwargs),toy(micro, n=n, **kwargs),make()
    plan = acc.plan(b.dls, n_epoch)
    a.dls.loaders[0] = BatchSizesLoader(a.dls.train, plan.sizes, start_epoch)
    for o,more in ((a,[]),(b,[acc])): o.fit_one_cycle(n_epoch, 0.05, cbs=cbs()+more, start_epoch=start_epoch)
    assert_same_run(a, b)
    assert len(b.recorder.losses)==len(b.recorder.accum_bs)==sum(plan.steps[start_epoch:])
    return a,b,plan

annealers = dict(lin=SchedLin, cos=SchedCos, exp=SchedExp, no=SchedNo, poly=partial(SchedPoly, power=2))

@pytest.mark.parametrize('seed', pick_cases(20, range(100)))
def test_a_random_schedule_is_the_run_on_batches_of_the_planned_sizes(seed):
    "Sizes, beginning, end, annealer, mode, data, optimizer, clipping and the first epoch are random"
    r = random.Random(seed)
    micro,n,n_epoch,drop_last = r.randint(1, 7),r.randint(30, 90),r.randint(1, 4),r.random()<0.3
    largest = n//(2*micro)*micro   # at least two steps in an epoch
    if r.random()<0.6:
        draw = r.random if r.random()<0.6 else partial(r.randint, 0, n_epoch)
        args = r.randint(1, largest),r.randint(1, largest),*sorted([draw(),draw()]),annealers[r.choice(list(annealers))]
        make = partial(Schedule, *args, drop_last=drop_last)
    else:
        mode = r.choice(['epoch','step'])
        factors = {r.randint(0, n_epoch if mode=='epoch' else 20):r.randint(1, max(1, largest//micro))
            for _ in range(3)}
        make = partial(Scheduler, factors, mode, drop_last=drop_last)
    cbs = [GradientClip(0.05)] if r.random()<0.3 else []
    compare(make, n_epoch, n, micro, cbs=lambda: cbs, tokens=r.random()<0.3, shuffle=r.random()<0.5, seed=seed,
        opt_func=r.choice([SGD,Adam]), start_epoch=r.randint(0, n_epoch-1) if r.random()<0.3 else 0)

# The plan

@given(n=st.integers(1, 500), micro=st.integers(1, 40), accum_bs=st.integers(1, 200), n_epoch=st.integers(1, 4),
    drop_last=st.booleans())
def test_a_plan_has_each_sample_of_an_epoch_in_one_step(n, micro, accum_bs, n_epoch, drop_last):
    plan = GradientAccumulation(accum_bs, drop_last=drop_last).plan(DataLoader(range(n), bs=micro), n_epoch)
    full = -(-accum_bs//micro)*micro
    assert len(plan.sizes)==len(plan.steps)==n_epoch and plan.drop_last==drop_last
    for sizes,steps in zip(plan.sizes, plan.steps):
        assert list(sizes)==[full]*(n//full)+[n%full]*(n%full>0 and not drop_last) and steps==len(sizes)

@given(n=st.integers(20, 300), micro=st.integers(1, 9), a=st.integers(1, 60), b=st.integers(1, 60), s=st.floats(0, 1),
    f=st.floats(0, 1), annealer=st.sampled_from(list(annealers)), n_epoch=st.integers(1, 4), drop_last=st.booleans())
def test_sizes_follow_the_annealer(n, micro, a, b, s, f, annealer, n_epoch, drop_last):
    "Sizes are whole micro-batches, at most half a micro-batch from the value of the annealer"
    s,f = sorted([s,f])
    first,last = (-(-o//micro)*micro for o in (a,b))
    acc = Schedule(a, b, start=s, finish=f, schedule=annealers[annealer], drop_last=drop_last)
    for epoch,sizes in enumerate(acc.plan(DataLoader(range(n), bs=micro), n_epoch).sizes):
        done = 0
        for size in [*sizes,None]:
            pct = (epoch+done/n)/n_epoch
            ideal = last if pct>=f else first if pct<=s else annealers[annealer](first, last)((pct-s)/(f-s))
            if size is None: assert done==n or drop_last and ideal+micro/2>n-done-1e-6
            elif done+size==n and ideal>size: pass   # the last step of an epoch may be smaller
            else: assert (size%micro==0 or done+size==n) and 0<size and abs(size-ideal)<=micro/2+1e-6
            done += size or 0

@pytest.mark.parametrize('start,finish,pcts', [(1,3,(0.25,0.75)), (0.25,3,(0.25,0.75)), (0,4,(0.,1.))], ids=str)
def test_start_and_finish_are_epochs_as_whole_numbers_and_fractions_of_the_fit_as_floats(start, finish, pcts):
    def sizes(s, f): return Schedule(8, 32, start=s, finish=f).plan(toy(4, n=64).dls, 4).sizes
    assert sizes(start, finish)==sizes(*pcts)

there_and_back = combine_scheds([.5,.5], [SchedLin(8,32),SchedLin(32,8)])

@pytest.mark.parametrize('make,n_epoch,expected', [
    (lambda: Scheduler({3:4, 1:2}), 5, [[4]*16,[8]*8,[8]*8,[16]*4,[16]*4]),
    (lambda: Scheduler({20:2, 24:4}, mode='step'), 3, [[4]*16,[4]*4+[8]*4+[16],[16]*4]),
    (lambda: Scheduler({0:2, 3:5, 5:3}, mode='step'), 1, [[8,8,8,20,20]]),
    (lambda: Scheduler({0:np.int8(64)}), 1, [[64]]),   # 4*np.int8(64) would overflow to 0
    (lambda: Schedule(16, 16, finish=1., schedule=lambda a,b: lambda pos: 1), 1, [[16]+[4]*12]),
    (lambda: Schedule(8, 16, finish=1., schedule=there_and_back), 2, [[8,12,16,20,8],[32,20,12]])], ids=range(6))
def test_examples_of_plans_and_their_runs(make, n_epoch, expected):
    "Thresholds in any order, steps counted over the whole fit, small steps, and combined annealers"
    for epoch in range(min(2, n_epoch)):   # a whole fit, and a resumed fit
        assert compare(make, n_epoch, n=64, micro=4, start_epoch=epoch)[2].sizes==expected

def test_plot_sched_draws_the_plan():
    acc,dls = Schedule(8, 32, finish=2, drop_last=True),toy(4).dls
    plan = acc.plan(dls, 3).sizes
    sizes,starts = sum(plan, []),[e+sum(o[:i])/70 for e,o in enumerate(plan) for i in range(len(o))]
    for ax,ys in zip(acc.plot_sched(dls, 3), ([*sizes,sizes[-1]],range(len(sizes)+1))):
        assert list(ax.lines[0].get_ydata())==[*ys] and np.allclose(ax.lines[0].get_xdata(), [*starts,3])
    plt.close('all')

# Fit after fit

def test_each_fit_starts_the_schedule_from_its_beginning():
    """An earlier fit, an interrupt or pickling has no effect

    A fit with `start_epoch` continues the schedule.
    """
    make = partial(Schedule, 8, 32, start=1, finish=3, schedule=partial(SchedPoly, power=2))
    _,expected,plan = compare(make, n_epoch=4, n=70, micro=4)
    _,b,_ = compare(make, n_epoch=4, n=70, micro=4, start_epoch=2)
    assert b.recorder.accum_bs==expected.recorder.accum_bs[sum(plan.steps[:2]):]
    acc,learn = make(),toy(4)
    interrupt = RaiseAt('after_backward', KeyboardInterrupt, 5, skip=20)
    with pytest.raises(KeyboardInterrupt): learn.fit(4, cbs=[acc,interrupt])
    learn.model.load_state_dict(toy(4).model.state_dict())
    for l,o in ((learn,acc),(toy(4),pickle.loads(pickle.dumps(acc)))):
        l.fit_one_cycle(4, 0.05, cbs=o, reset_opt=True)
        assert l.recorder.accum_bs==expected.recorder.accum_bs
        assert_same_run(expected, l)

@pytest.mark.parametrize('make', [lambda: Schedule(8, 32), lambda: Scheduler({0:2, 1:4}),
    lambda: Scheduler({0:2, 1:4}, 'step'), lambda: Schedule(8, 32, start=3, finish=1.)],
    ids=['fraction','epoch','step','from_an_epoch_to_a_fraction'])
def test_lr_find_takes_steps_of_the_first_size_of_a_schedule(make):
    a,b = toy(8, n=64),toy(4, n=64, cbs=make())
    for o in (a,b): o.lr_find(num_it=30, show_plot=False, stop_div=False)
    assert b.recorder.accum_bs==[8]*30
    assert_same_run(a, b)
