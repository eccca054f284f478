"Properties of the plan and of the counters, for all sizes."
from hypothesis import given, settings, strategies as st
from fastaccum.macro_batch import MacroBatch, Plan, round_up

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

@given(batches=st.lists(st.tuples(st.integers(1, 50), st.floats(-10, 10)), min_size=1, max_size=20), planned=st.integers(1, 300))
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

@given(n=st.integers(1, 300), micro=st.integers(1, 20), lo=st.integers(1, 50), hi=st.integers(1, 50), n_epoch=st.integers(1, 4), drop=st.booleans())
def test_plan_of_a_function_of_progress(n, micro, lo, hi, n_epoch, drop):
    def size(pos): return lo+(hi-lo)*pos
    asked = []
    def noted(pos):
        asked.append(pos)
        return round(size(pos.pct))
    epochs = Plan(n, micro, noted, n_epoch, drop).sizes
    pcts = [o.pct for o in asked]
    assert pcts==sorted(pcts) and 0==pcts[0] and pcts[-1]<1
    assert all(o.epoch==int(o.pct*n_epoch+1e-9) for o in asked)
    if not drop: assert [o.step for o in asked]==list(range(sum(map(len, epochs))))
    for steps in epochs: assert all(o%micro==0 for o in steps[:-1]) and (drop or sum(steps)==n)
