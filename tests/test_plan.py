"Properties of the plan and of the counters, for all sizes."
import pytest, random
from math import ceil
from hypothesis import given, settings, strategies as st
from fastaccum.core.macro_batch import MacroBatch, Position, round_up
from fastaccum.core.plan import Plan
from fastaccum.processes.shares import SharedPlan, share

sizes = dict(n=st.integers(1, 500), micro=st.integers(1, 40), accum=st.integers(1, 200), drop=st.booleans())

def micro_sizes(n, micro): return [min(micro, n-o) for o in range(0, n, micro)]

@given(**sizes)
def test_round_up(n, micro, accum, drop):
    full = round_up(accum, micro)
    assert full%micro==0 and accum<=full<accum+micro

@given(**sizes, n_epoch=st.integers(1, 4))
def test_every_sample_in_exactly_one_macro_batch(n, micro, accum, drop, n_epoch):
    epochs = Plan(n, micro, accum, n_epoch, drop).sizes
    full = round_up(accum, micro)
    assert len(epochs)==n_epoch
    for steps in epochs:
        assert sum(steps)==(n//full*full if drop else n)
        assert all(o==full for o in steps[:-1])
        assert all(0<o<=full for o in steps)
        assert len(steps)==(n//full if drop else -(-n//full))

@given(**sizes)
@settings(max_examples=300)
def test_counters_do_what_the_plan_says(n, micro, accum, drop):
    "Announcing micro-batch after micro-batch makes the macro-batches of the plan"
    macro,steps = MacroBatch(),[]
    macro.start(accum, accum)
    batches = micro_sizes(n, micro)
    for i,o in enumerate(batches):
        macro.announce(o, last=i==len(batches)-1)
        macro.add(o, o, 1.)
        if macro.closing:
            steps.append(macro.samples)
            macro.start(accum, accum)
    assert steps==Plan(n, micro, accum).sizes[0]

@given(batches=st.lists(st.tuples(st.integers(1, 50), st.floats(-10, 10)), min_size=1, max_size=20),
    planned=st.integers(1, 300))
def test_weighted_sum_is_the_mean(batches, planned):
    "Whatever was planned, weights and correction give the mean over everything counted"
    macro = MacroBatch()
    macro.start(10**6, planned)
    total = 0
    for n,loss in batches:
        macro.announce(n)
        total += macro.weight(n, n)*loss
        macro.add(n, n, loss)
    mean = sum(n*l for n,l in batches)/sum(n for n,_ in batches)
    assert abs(total*macro.ref/macro.size-mean)<1e-9
    assert abs(macro.loss/macro.size-mean)<1e-9

@given(n=st.integers(1, 300), micro=st.integers(1, 20), lo=st.integers(1, 50), hi=st.integers(1, 50),
    n_epoch=st.integers(1, 4), drop=st.booleans())
def test_plan_of_a_function_of_progress(n, micro, lo, hi, n_epoch, drop):
    def size(pos): return lo+(hi-lo)*pos
    asked = []
    def noted(pos):
        asked.append(pos)
        return round(size(pos.pct))
    epochs = list(Plan(n, micro, noted, n_epoch, drop).sizes)
    pcts = [o.pct for o in asked]
    assert pcts==sorted(pcts) and 0==pcts[0] and pcts[-1]<1
    assert all(o.epoch==int(o.pct*n_epoch+1e-9) for o in asked)
    if not drop: assert [o.step for o in asked]==list(range(sum(map(len, epochs))))
    for steps in epochs: assert all(o%micro==0 for o in steps[:-1]) and (drop or sum(steps)==n)

# What is worked out when asked is what a loop over all macro-batches writes down

class Written:
    "Every macro-batch of a run, one after the other; with one loader, or with those of several processes"
    def __init__(self, loaders, accum_bs, n_epoch, drop_last, never_empty=False):
        self.sizes,self.begins,self.n_epoch,ns = [],[],n_epoch,[n for _,n in loaders]
        for epoch in range(n_epoch):
            done,sizes,begins,step = [0]*len(ns),[],[],sum(map(len, self.sizes))
            while sum(done)<sum(ns):
                pos = Position(epoch, step+len(sizes), (epoch+sum(done)/sum(ns))/n_epoch)
                wanted = accum_bs(pos) if callable(accum_bs) else accum_bs
                full = [share(wanted, len(ns), bs) for bs,_ in loaders]
                got = [min(f, n-d) for f,n,d in zip(full, ns, done)]
                if not sizes: keep = not drop_last or never_empty and got!=full
                dropped = got!=full and not keep
                begins.append((ceil(wanted/len(ns)),sum(got)/len(ns),dropped))
                if dropped: break
                sizes.append(sum(got))
                done = [d+g for d,g in zip(done, got)]
            self.sizes.append(sizes)
            self.begins.append(begins)

    def next_pct(self, pct, epoch): return min(pct+1./(len(self.sizes[epoch])*self.n_epoch), (epoch+1)/self.n_epoch)

ways = dict(fixed=lambda lo,hi: lo, pct=lambda lo,hi: lambda pos: round(lo+(hi-lo)*pos.pct),
            step=lambda lo,hi: lambda pos: lo if pos.step%5<3 else hi,
            epoch=lambda lo,hi: lambda pos: hi if pos.epoch else lo)
runs = dict(ns=st.lists(st.integers(1, 150), min_size=1, max_size=3),
            micros=st.lists(st.integers(1, 12), min_size=3, max_size=3), lo=st.integers(1, 80),
            hi=st.integers(1, 80), n_epoch=st.integers(0, 4), drop=st.booleans(), never_empty=st.booleans(),
            way=st.sampled_from(list(ways)), seed=st.integers(0, 99))

@given(**runs)
@settings(max_examples=400, deadline=None)
def test_the_plan_is_what_a_loop_writes_down(ns, micros, lo, hi, n_epoch, drop, never_empty, way, seed):
    "In whatever order it is asked, from one process or as one of several"
    loaders,size = tuple(zip(micros, ns)),ways[way](lo, hi)
    plans = [SharedPlan(i, loaders, size, n_epoch, drop, never_empty) for i in range(len(ns))]
    if len(ns)==1: plans.append(Plan(ns[0], micros[0], size, n_epoch, drop, never_empty))
    old = Written(loaders, size, n_epoch, drop, never_empty)
    for plan in plans:
        def same_sizes():
            assert plan.sizes==old.sizes and list(plan.sizes)==old.sizes and [list(o) for o in plan.sizes]==old.sizes
        def same_steps(): assert plan.steps==[len(o) for o in old.sizes] and len(plan.steps)==n_epoch
        def same_before():
            assert [plan.before(o) for o in range(n_epoch+1)]==[sum(map(len, old.sizes[:o])) for o in range(n_epoch+1)]
        def same_one():
            for o in random.sample(range(n_epoch), n_epoch):
                assert plan.sizes[o]==old.sizes[o] and plan.sizes[o-n_epoch]==old.sizes[o]
                assert plan.steps[o]==len(old.sizes[o])
        def same_pct():
            for o in range(n_epoch):
                pct = o/n_epoch
                for _ in old.sizes[o]:
                    assert plan.next_pct(pct, o)==old.next_pct(pct, o)   # to the bit
                    pct = plan.next_pct(pct, o)
        def same_begin():
            step = 0
            for o in range(n_epoch):
                i = 0
                for t,expected in enumerate(old.begins[o]):
                    assert plan.begin(o, step+t, i)==expected
                    i += -(-expected[0]//plan.micro_bs)
                step += len(old.sizes[o])
        checks = [same_sizes,same_steps,same_before,same_one,same_pct,same_begin]
        random.Random(seed).shuffle(checks)
        for check in checks: check()
        empty = [not o for o in old.sizes]
        first = plan.first_unfilled()
        if drop and not never_empty: assert first==(empty.index(True) if any(empty) else None)
        if never_empty: assert not any(empty)
        assert [bool(plan.drops(o)) for o in range(n_epoch)]==[drop and not (never_empty and bool(plan.unfilled(o)))
            for o in range(n_epoch)]

@given(**runs)
@settings(deadline=None)
def test_epochs_after_the_last_have_an_answer(ns, micros, lo, hi, n_epoch, drop, never_empty, way, seed):
    "A fit nested in another one counts the outer one's epochs on: sizes are those with which training ends"
    args = ways[way](lo, hi),n_epoch,drop,never_empty
    for plan in (SharedPlan(0, tuple(zip(micros, ns)), *args), Plan(ns[0], micros[0], *args)):
        epoch,step = n_epoch+3,plan.before(n_epoch+3)
        last = plan.accum_bs(Position(epoch, step, 1.)) if callable(plan.accum_bs) else plan.accum_bs
        assert plan.begin(epoch, step, 0)[0]==-(-last//len(plan.loaders))
        assert len(plan.sizes[epoch])==plan.steps[epoch] and len(list(plan.sizes))==n_epoch

@given(n=st.integers(1, 150), micro=st.integers(1, 12), lo=st.integers(1, 60), hi=st.integers(1, 60),
       n_epoch=st.integers(1, 4), drop=st.booleans(),
       never_empty=st.booleans(), way=st.sampled_from(list(ways)),
       changes=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 60)), max_size=6))
@settings(max_examples=400, deadline=None)
def test_changes_on_the_way(n, micro, lo, hi, n_epoch, drop, never_empty, way, changes):
    "What was begun stays, what comes has the new size, and progress reaches each epoch's end with its last step"
    plan,changes = Plan(n, micro, ways[way](lo, hi), n_epoch, drop, never_empty),dict(changes)
    taken,begun,now,changed = [],0,None,set()
    for epoch in range(n_epoch):
        i,sizes,pct,step,rises = 0,[],epoch/n_epoch,sum(map(len, taken)),[]
        while i*micro<n:
            if begun in changes:
                now = changes[begun]
                plan.change(now, epoch, step+len(sizes), i)
                if sizes: changed.add(epoch)
                rises = []
            begun += 1
            wanted,size,dropped = plan.begin(epoch, step+len(sizes), i)
            full = round_up(wanted, micro)
            assert now in (None,wanted) and size==min(full, n-i*micro)
            assert dropped==(drop and size<full and bool(i or not never_empty))
            if dropped: break
            sizes.append(size)
            new = plan.next_pct(pct, epoch)
            # a step on what was to be left out
            assert pct<new<=(epoch+1)/n_epoch or epoch in changed and pct<=new and new>(epoch+1)/n_epoch-1e-12
            rises.append(new-pct)
            pct = new
            i += -(-size//micro)
        taken.append(sizes)
        left_out = n-sum(sizes)
        if sizes and not (left_out and epoch in changed): assert abs(pct-(epoch+1)/n_epoch)<1e-12
        if now is not None and not drop: assert max(rises, default=0)-min(rises, default=0)<1e-12   # spread evenly
        assert plan.sizes[:epoch+1]==taken and plan.steps[:epoch+1]==[len(o) for o in taken]
    assert plan.sizes==taken and plan.steps==[len(o) for o in taken]
    assert [plan.before(o) for o in range(n_epoch+1)]==[sum(map(len, taken[:o])) for o in range(n_epoch+1)]
    for epoch in set(range(n_epoch))-changed:   # an epoch of one piece has the arithmetic of a plan that never changed
        if taken[epoch]:
            assert plan.next_pct(epoch/n_epoch, epoch)==min(epoch/n_epoch+1./(len(taken[epoch])*n_epoch),
                (epoch+1)/n_epoch)

def test_a_change_as_an_epoch_begins_is_the_plan_of_the_new_size():
    for n_epoch in range(1, 12):
        for epoch in range(n_epoch):
            a,b = Plan(70, 2, 10, n_epoch),Plan(70, 2, 6, n_epoch)
            b.change(10, epoch, b.before(epoch), 0)
            for o in range(epoch, n_epoch):
                assert a.next_pct(o/n_epoch, o)==b.next_pct(o/n_epoch, o) and a.next_pct(0., o)==b.next_pct(0., o)
                assert a.sizes[o]==b.sizes[o]

def test_processes_do_not_change_in_mid_epoch():
    with pytest.raises(NotImplementedError, match='make a new plan'):
        SharedPlan(0, ((4,40),(4,40)), 16).change(32, 0, 1, 2)

# Work

class Asked:
    "A size, or sizes, and how often they were asked for"
    def __init__(self, *sizes): self.sizes,self.n = sizes,0
    def __call__(self, pos):
        self.n += 1
        return self.sizes[pos.step%len(self.sizes)]

def plans(accum_bs, n, bs, n_epoch, **kwargs):
    return Plan(n, bs, accum_bs, n_epoch, **kwargs),SharedPlan(0, ((bs,n//2),(bs,n-n//2)), accum_bs, n_epoch, **kwargs)

def test_a_fixed_size_is_a_formula(monkeypatch):
    "Nothing is done for each macro-batch or for each epoch, and nothing is kept for them"
    counted = []
    real = Plan._count
    monkeypatch.setattr(Plan, '_count', lambda *args, **kwargs: counted.append(1) or real(*args, **kwargs))
    monkeypatch.setattr(Plan, '_walk', None)
    for drop in (False,True):
        for plan in plans(48, 10**15+7, 1, 10**12, drop_last=drop):
            full = plan.full(24 if plan.loaders[1:] else 48)
            assert plan.steps[10**9]==plan.steps[-1]==(10**15+7)//full+(not drop)
            assert plan.before(10**12)==10**12*plan.steps[0]
            assert plan.sizes[10**9][10**12]==full and plan.sizes[0][-1]==(full if drop else (10**15+7)%full)
            assert plan.first_unfilled() is None and plan.begin(10**9, plan.before(10**9), 0)[2] is False
            plan.next_pct(0.5, 10**9)
            assert len(plan.past)==1
    assert len(counted)==4

@pytest.mark.parametrize('n_epoch', [20,200])
def test_sizes_of_a_function_are_asked_once_for_each_step(n_epoch):
    for i in (0,1):
        size = Asked(8, 24, 16)
        plan = plans(size, 256, 4, n_epoch)[i]
        assert not size.n   # nobody looked
        total = sum(plan.steps)
        assert size.n==total==plan.before(n_epoch)
        for o in range(n_epoch): plan.next_pct(0., o), plan.before(o), plan.steps[o]
        assert size.n==total
        assert sum(len(o) for o in plan.sizes)==total and size.n<=2*total     # only the numbers of steps are kept
        kept = [len(o) for o in vars(plan).values() if hasattr(o, '__len__') and not isinstance(o, str)]
        assert max(kept)<=n_epoch+1
        size.n = 0
        plan = plans(size, 256, 4, n_epoch)[i]
        for sizes in plan.sizes: assert sizes[0]==sizes[0] and sizes[-1]>0
        assert sum(plan.steps)==size.n==total
        size.n = 0
        fresh = plans(size, 256, 4, n_epoch)[i]
        assert sum(fresh.sizes[2])==256 and size.n==fresh.before(3)     # no further than the epoch that was looked at
        assert [fresh.sizes[2][0] for _ in range(9)]==9*[fresh.sizes[2][0]] and size.n==fresh.before(3)

def test_a_fit_asks_for_a_step_when_it_comes():
    "Two questions for each step of the epochs that are trained: to know how many there are, and when it begins"
    from fastaccum import GradientAccumulation
    from fastaccum.testing import toy
    class Sized(GradientAccumulation):
        name = 'gradient_accumulation'
        def sizes(self, micro_bs, n_epoch): return size
    size,learn = Asked(8, 24, 16),toy(4, n=128)
    learn.fit(3, 0.1, cbs=Sized(8))
    assert size.n==2*len(learn.recorder.losses)

@pytest.mark.parametrize('acc', ['GradientAccumulation(16)','GradientAccumulationSchedule(8, 32, 0, 3)',
                                 'GradientAccumulationSchedule(8, 32)',
                                 'GradientAccumulationScheduler({0:2, 1:4})'])
@pytest.mark.parametrize('drop_last', [None,True])
def test_no_epochs(acc, drop_last):
    "`learn.fit(0)` trains nothing, and the next fit is as ever"
    import warnings
    from fastaccum import all
    from fastaccum.testing import assert_twins, toy
    a,b = toy(4, n=70),toy(4, n=70)
    make = lambda: eval(acc.replace(')', ', drop_last=drop_last)'), {**vars(all), 'drop_last':drop_last})
    plan = make().plan(b.dls, 0)
    assert plan.sizes==[] and plan.steps==[] and plan.before(0)==0
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # `finish` comes after the end of training
        b.fit(0, 0.1, cbs=make())
    assert not getattr(b.recorder, 'losses', [])
    for o in (a,b): o.fit(4, 0.1, cbs=make())
    assert_twins(a, b)
