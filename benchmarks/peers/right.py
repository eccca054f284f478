"Run the cases with a peer, and compare each run with its twin."
import copy, math, re
from dataclasses import replace
from .cases import Data, apart, cases, interrupted, optimizer_steps, twin, weights
from .peer import CannotExpress

def run(peer_cls, case):
    "What came of `case`, a dict; its 'outcome' is 'ran', 'refused', 'not supported' or 'failed'"
    peer = peer_cls()
    model = peer.make_model(case)
    start,passes,watched = weights(model),[],getattr(model, 'inner', model)
    def note(module, _):
        if module is watched: passes.append(0)   # not the twin, a copy
    handle = watched.register_forward_pre_hook(note)
    try: return kinds[case.kind](peer, case, model)
    except CannotExpress as e: return dict(outcome='not supported', why=str(e))
    except (Exception,SystemExit) as e:
        moved = not weights(model).equal(start)
        why = f'{type(e).__name__}: {short(e)}'
        if case.amp and not passes: return dict(outcome='not supported', why=f'no fp16 on a CPU: {why}')
        return dict(outcome='failed' if moved or (passes and case.kind!='bad') else 'refused', why=why)
    finally: handle.remove()

def short(e):
    "The message in one line; fastai puts the name of a callback before it"
    return re.sub(r'^Exception occured in .*?: ', '', re.sub(r'\s+', ' ', str(e).strip()))[:160] or 'no message'

def moved(a, b): return (a-b).abs().max().item() if b.isfinite().all() else math.inf

def compared(peer, case, model, big, data, size, epochs=None):
    "Fit, and fit the twin `big`, which starts with the same weights; compare them"
    losses,lrs = twin(case, big, data, size, epochs)
    with optimizer_steps() as seen:
        peer.fit(data, epochs or case.epochs, case.micro, size if case.kind=='interrupt' else case.accum)
    recorded = peer.losses()
    return dict(outcome='ran', steps=len(seen), expected=len(lrs), lr=apart(lrs, seen),
        weights=moved(weights(big), weights(model)),
        recorded=None if recorded is None else len(recorded), loss=apart(peer.recorded_as(losses), recorded))

def fit(peer, case, model):
    big = copy.deepcopy(model)
    peer.start(case, model)
    size = peer.twin_size(case.micro, case.accum)
    return compared(peer, case, model, big, Data(case), size) | dict(step_of=size)

def again(peer, case, model):
    """The twin starts where the peer's first fit ended: only the second is compared. Without momentum, which not
    all keep"""
    case = replace(case, mom=0.)
    peer.start(case, model)
    peer.fit(Data(case, n=200, seed=2), 1, case.micro, case.accum)
    return compared(peer, case, model, copy.deepcopy(model), Data(case), case.accum)

def interrupt(peer, case, model):
    case = replace(case, mom=0.)
    peer.start(case, model)
    with interrupted(model, 7) as seen:
        try: peer.fit(Data(case, seed=2), 1, case.micro, case.accum)
        except (KeyboardInterrupt,SystemExit): pass
    assert len(seen)>=7, 'the fit ended before it could be interrupted'
    twin = copy.deepcopy(model)   # a copy has no gradients
    return compared(peer, case, model, twin, Data(case), case.micro, epochs=1)

def bad(peer, case, model):
    "Refused before a weight moved? If not, what became of the weights, and of the loss"
    start,data = weights(model),Data(case)
    x,y = data.ds.tensors
    before = case.loss(model(x), y).item()
    peer.start(case, model)
    with optimizer_steps() as seen: peer.fit(data, case.epochs, case.micro, case.accum)
    after = case.loss(model(x), y).item()
    now = weights(model)
    if not now.isfinite().all(): what = 'weights became NaN'
    elif after>before: what = 'the loss went up'
    else: what = 'trained nothing' if now.equal(start) else 'trained as if it were right'
    return dict(outcome='ran', steps=len(seen), what=f'{what} ({before:.2f} to {after:.2f})')

kinds = dict(fit=fit, again=again, interrupt=interrupt, bad=bad)

def clean(o):
    "NaN and infinity are not JSON"
    return {k:('inf' if isinstance(v, float) and not math.isfinite(v) else v) for k,v in o.items()}

def run_all(peer_cls):
    "The outcome of each case"
    return {case.key:clean(run(peer_cls, case)) for case in cases}
