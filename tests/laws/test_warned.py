"""Right or loud: a fit that is the full-batch run says nothing; one that differs, or may, says so once, and what the
warning says to do makes it the same."""
import linecache, random, re, warnings
import numpy as np, pytest, torch
from collections import Counter
from functools import partial
from types import SimpleNamespace
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.text.all import (Adam, BCEWithLogitsLossFlat, CancelBatchException, CrossEntropyLossFlat, DataLoader,
    DataLoaders, DiceLoss, FocalLossFlat, GradientClip, LabelSmoothingCrossEntropyFlat, Learner, MSELossFlat, MixUp,
    Module, SGD, SortedDL, set_seed)
from fastaccum import AccumulationWarning, FreezeBN, GradientAccumulation, GradientAccumulationSchedule
from fastaccum.core import forward_state
from fastaccum.testing import CrossEntropy, Float32Loss, assert_same_run, deviation, toy, toy_data, both_runs
from common import (BatchListLoader, CallAt, CpuMixedPrecision, LimitedMemory, RecordAt, batch_dice_loss,
    collect_warnings, in_chunks, nt_xent, runs_out_above, trim_padding, weights, weights_unchanged)
from small_learners import MixUpLoss, all_params

def count_warnings(f):
    "How often each of our warnings comes in `f`: by the category, and the entry that it links to"
    with collect_warnings() as res: f()
    ours = [(o.category,str(o.message).partition('.html#')[2]) for o in res]
    return Counter((c.__name__ if issubclass(c, AccumulationWarning) else '',key) for c,key in ours if key)

loss,not_tried,batchnorm,order,state = (('LossWarning','loss-not-a-mean'),('LossWarning','loss-not-tried'),
    ('BatchNormWarning','batchnorm'),('LoaderWarning','loader-order'),('StateWarning','hidden-state'))
penalised = '','added-to-a-sum'

def fit(l, cbs): l.fit(2, 0.05, cbs=cbs)
def cancel(): raise CancelBatchException
def little(l, cbs): l.fit(2, 1e-3, cbs=cbs)   # a sum's gradients are large

def run(**kwargs):
    "What is said of a fit on micro-batches; the full-batch run, and that fit"
    res = []
    return count_warnings(lambda: res.extend(both_runs(**dict(dict(n=70, fit=fit), **kwargs)))),*res

def off(a, b): return deviation(weights(a), weights(b))

# Models, losses and callbacks

def layers(*ms): return nn.Sequential(nn.Linear(5, 6), *ms, nn.Linear(6, 3)).double()
def normed(mean=.1):
    bn = nn.BatchNorm1d(6)
    bn.running_mean.fill_(mean)   # as if it was pretrained
    return layers(bn, nn.Tanh())
def sample_norms():
    return layers(nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.Unflatten(1, (2,3)), nn.InstanceNorm1d(2), nn.Flatten())

class Remembers(nn.Linear):
    "Keeps a part of what it has seen until `reset`"
    seen = torch.zeros(3).double()
    def reset(self): self.seen = torch.zeros(3).double()
    def forward(self, x):
        res = super().forward(x)+self.seen
        self.seen = self.seen+0.1*res.detach().mean(0)
        return res

class Masked(nn.Module):
    "A mean over what is not ignored, of which nobody knows"
    def forward(self, p, y):
        keep = (y!=-100).flatten()
        return (F.cross_entropy(p.flatten(0, -2), y.flatten().clamp(min=0), reduction='none')*keep).sum()/keep.sum()

def not_ignored(l): return (l.y!=-100).sum()
def ignoring(p, y): return F.cross_entropy(p.flatten(0, -2), y.flatten())   # targets of -100, and does not tell
def summed(p, y): return F.cross_entropy(p, y, reduction='sum')

class SumForMean(MixUpLoss):
    "Says that it is a mean, and with MixUp, which asks for each sample's, returns more than it should"
    def forward(self, p, y): return super().forward(p, y)*len(y)

def penalty(l): return sum(p.pow(2).sum() for p in l.model.parameters())
def adds(l): l.loss_grad = l.loss_grad+penalty(l)
def adds_in_place(l): l.loss_grad += penalty(l)
def adds_of_predictions(l): l.loss_grad = l.loss_grad+l.pred.pow(2).mean()
def doubles(l): l.loss_grad = l.loss_grad*2
def resets(event): return lambda: [CallAt(event, lambda l: l.model.reset(), run_valid=True)]

class Mix(MixUp):
    "Mixes each sample with its neighbour, which is in the same micro-batch however large that is"
    def before_batch(self):
        self.yb1,self.lam = tuple(y.view(-1, 2).flip(1).flatten() for y in self.yb),torch.tensor(0.3).double()
def mixable(*args, loss=MixUpLoss, **kwargs): return toy(*args, loss_func=loss(), **kwargs)

# Exact, and silent

sums = dict(loss_func=CrossEntropy(reduction='sum'), fit=little)
# (more of them: test_tokens.py)
exact = dict(plain=dict(), adam=dict(opt_func=Adam),
    one_cycle=dict(fit=lambda l,cbs: l.fit_one_cycle(1, 0.05, cbs=cbs)), ones=dict(micro=1), threes=dict(micro=3, n=71),
    no_accumulation=dict(micro=16, loss_func=summed, model=normed, fit=little), split=dict(micro=8,
    acc=dict(micro_batch_size=2)), frozen_batchnorm=dict(model=normed, cbs=lambda: [FreezeBN()]),
    norms_of_a_sample=dict(model=sample_norms), clipped=dict(tokens=True, cbs=lambda: [GradientClip(0.1)]),
    state_of_a_batch=dict(model=lambda: Remembers(5, 3).double(), splitter=all_params, cbs=resets('before_batch')),
    doubled=dict(cbs=lambda: [RecordAt('after_loss', doubles)]), penalised_sum_of_a_step=dict(micro=16,
    acc=dict(micro_batch_size='auto'), cbs=lambda: [RecordAt('after_loss', adds)], **sums))
exact |= {f'{f.__name__}_{event}':dict(tokens=True, cbs=lambda event=event,f=f: [RecordAt(event, f)])
    for event,f in (('after_loss',adds),('after_loss',adds_in_place),('before_backward',adds))}
exact |= {f'mixed_{r}':dict(n=64, make=partial(mixable, loss=partial(MixUpLoss, reduction=r)), fit=little,
    cbs=lambda: [Mix()]) for r in ('mean','sum')}

@pytest.mark.parametrize('nm', exact)
def test_a_fit_that_is_the_full_batch_run_says_nothing(nm):
    said,a,b = run(**exact[nm])
    assert not said and assert_same_run(a, b)

# Losses: fastai's and torch's, and those in which samples meet

gen = torch.Generator().manual_seed(0)
def r(*shape): return torch.randn(*shape, generator=gen)
def classes(*shape): return torch.randint(0, 5, shape, generator=gen)
plain,values,bits = (r(32, 5),classes(32)),(r(32, 3),r(32, 3)),(r(32, 5),classes(32, 5).clamp(max=1).float())
masks,padded = (r(32, 5, 4, 4),classes(32, 4, 4)),(r(32, 6, 5),classes(32, 6))
padded[1][:,2:][torch.rand(32, 4, generator=gen)<torch.rand(32, 1, generator=gen)] = -100
few = plain[0],torch.where((torch.arange(32)-17).abs()>12, plain[1], -100)   # a part may have none
w5 = torch.tensor([0.2,1.,5.,0.5,2.])

right = dict(cross_entropy=(CrossEntropyLossFlat(), plain), class_weights=(CrossEntropyLossFlat(weight=w5), plain),
    smoothed=(LabelSmoothingCrossEntropyFlat(), plain), sum=(CrossEntropyLossFlat(reduction='sum'), plain),
    smoothed_weighted=(nn.CrossEntropyLoss(label_smoothing=.1, weight=w5), plain),
    padded=(CrossEntropyLossFlat(), padded), focal=(FocalLossFlat(weight=w5), plain), dice=(DiceLoss(), masks),
    masks=(CrossEntropyLossFlat(axis=1), masks), mse=(MSELossFlat(), values), huber=(nn.HuberLoss(), values),
    bce=(BCEWithLogitsLossFlat(), bits), pos_weight=(nn.BCEWithLogitsLoss(pos_weight=w5), bits),
    constant=(lambda p, y: F.cross_entropy(p, y)+9, plain),
    several=(lambda p, y: F.cross_entropy(p[0], y)+p[1].pow(2).mean(), plain, lambda p: (p,p[:,:3])),
    named=(lambda p, y: F.cross_entropy(p['logits'], y), plain, lambda p: dict(logits=p)),
    time_first=(lambda p, y: F.cross_entropy(p.mean(0), y), (r(32, 20, 5),plain[1]), lambda p: p.transpose(0, 1)))
wrong = dict(hidden_mean=(Masked(), padded), sum_for_mean=(summed, plain),
    root=(lambda p, y: F.mse_loss(p, y).sqrt(), values), contrastive=(nt_xent, plain), dice=(batch_dice_loss, masks),
    smoothed_weighted=(LabelSmoothingCrossEntropyFlat(weight=w5), plain),
    spread=(lambda p, y: ((p-p.mean(0))**2).mean(), plain), few_labels=(lambda p, y: F.cross_entropy(p, y), few))
def of_16_at_least(p, y):
    if len(p)<16: raise ValueError('too few')
    return F.cross_entropy(p, y)
untried = dict(torch_draws=lambda p, y: F.cross_entropy(p+torch.randn(p.shape), y), numpy_draws=lambda p, y: p.mean()*
    np.random.rand(), python_draws=lambda p, y: p.mean()*random.random(), raises=of_16_at_least)

class Scale(Module):
    def __init__(self, x, out): self.w,self.out = nn.Parameter(torch.ones(x.shape[1:])),out
    def forward(self, x): return self.out(x*self.w)

def step(bs, f, data, out=lambda p: p, cbs=None):
    "The gradient of 32 samples: the weights after a large step"
    dls = DataLoaders(DataLoader(TensorDataset(*data), bs=bs), DataLoader(TensorDataset(*data), bs=32))
    learn = Learner(dls, Scale(data[0], out), f, opt_func=SGD, cbs=Float32Loss())
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 1e3, cbs=cbs)
    return weights(learn)

@pytest.mark.parametrize('case', [*right.values(),*wrong.values()], ids=[*right,*(f'not_{o}' for o in wrong)])
def test_a_loss_is_warned_of_where_the_gradient_is_another(case):
    big,small = step(32, *case),[]
    said = count_warnings(lambda: small.append(step(16, *case, cbs=GradientAccumulation(32))))
    f,data,*out = case
    turned = step(32, f, [o.flip(0) for o in data], *out)   # the same sums in another order
    diff,rounding = (((o-big).abs().max()/big.abs().max()).item() for o in (small[0],turned))
    limit = 50*max(rounding, torch.finfo(big.dtype).eps)
    assert diff>50*limit and said=={loss:1} if case in wrong.values() else diff<limit and not said

some_padded,late,full = (toy_data(70, True) for _ in range(3))
late.tensors[1][:4].clamp_(min=0)   # no padding in the first micro-batch
full.tensors[1].clamp_(min=0)       # and nowhere
def computes(l): l.pred = dict(logits=l.pred, loss=ignoring(l.pred if l.y.ndim>1 else l.pred[:,None], l.y))
def hides(l): computes(l); l.yb = dict(labels=l.y),
def names(l): l.pred = dict(logits=l.pred)
def after(f, loss=lambda out,_: out['loss']):
    return dict(loss_func=loss, cbs=lambda: [CallAt('after_pred', f, run_valid=True)])
@pytest.mark.parametrize('micro', [1,4])
@pytest.mark.parametrize('data,kwargs,said', [(late,dict(loss_func=ignoring),loss), (late,{},None),
    (late,after(names, lambda out,y: ignoring(out['logits'], y)),loss), (some_padded,after(computes),not_tried),
    (some_padded,after(hides),not_tried), (some_padded,after(computes)|dict(acc=dict(n_items=not_ignored)),None),
    (full,after(computes),None), (toy_data(70),after(computes),None)])
def test_a_loss_is_tried_on_single_samples_and_on_more_than_the_first_micro_batch(micro, data, kwargs, said):
    "One that the model computes cannot be tried: it is told if samples have unequal labels"
    warned,a,b = run(micro=micro, accum_bs=16, tokens=data.tensors[1].ndim>1, data=data, **kwargs)
    assert warned==({said:1} if said else {}) and (off(a, b)>1e-3)==bool(said)

def test_single_samples_of_other_lengths_are_told():
    ds = toy_data(64, True)
    y = ds.tensors[1].clamp_(min=0)
    y[::2,3:] = y[1::2,5:] = -100   # no two in a row have one shape, in which they would be tried together
    said,a,b = run(micro=1, accum_bs=16, tokens=True, data=ds, loss_func=ignoring,
        cbs=lambda: [CallAt('before_batch', trim_padding, run_valid=True)])
    assert said=={not_tried:1} and off(a, b)>1e-3

@pytest.mark.parametrize('when,said', [(lambda l: l.train_iter==1,[('AccumulationWarning','cancelled')]),
    (lambda l: l.iter<9,[]), (lambda l: setattr(l, 'yb', ()),[])])   # without targets, fastai trains nothing either
def test_a_callback_that_cancels_all_that_is_left_of_an_epoch_is_told(when, said):
    skip = CallAt('before_batch', lambda l: cancel() if when(l) else None)
    assert count_warnings(lambda: toy(4, n=70).fit(2, .1, cbs=[GradientAccumulation(16),skip]))==Counter(said)

@pytest.mark.parametrize('nm', untried)
def test_a_loss_that_cannot_be_tried_on_parts_trains_and_only_an_error_is_told(nm):
    said = count_warnings(lambda: step(16, untried[nm], plain, cbs=GradientAccumulation(32)))
    assert said==({not_tried:1} if nm=='raises' else {})

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_rounding_of_half_precision_is_no_difference(dtype):
    def half(p, y): return F.cross_entropy(p.to(dtype), y)
    for i in range(0, 32, 8):
        data = [o.roll(i, 0) for o in plain]
        assert not count_warnings(lambda: step(16, half, data, cbs=GradientAccumulation(32)))

@pytest.mark.parametrize('where', ['fp16','bf16','device'])
@pytest.mark.parametrize('f,said', [(F.cross_entropy,{}), (summed,{loss:1})])
def test_the_loss_is_judged_with_mixed_precision_and_on_a_device_too(f, said, where, monkeypatch):
    "A device has random numbers of its own, whose state is compared; here the CPU's stand for them"
    if where=='device':
        own = SimpleNamespace(get_rng_state=lambda device: torch.get_rng_state(),
            set_rng_state=lambda o, device: torch.set_rng_state(o))
        monkeypatch.setattr(torch, 'get_device_module', lambda o: own)
        monkeypatch.setattr(forward_state, 'devices_of', lambda modules: [torch.device('cpu')])
    cbs = [GradientAccumulation(32), *([] if where=='device' else [CpuMixedPrecision(where)])]
    assert count_warnings(lambda: step(16, f, plain, cbs=cbs))==said

class Keeps(Module):
    "Keeps what it draws, with each call, and an average of the predictions"
    def __init__(self):
        self.register_buffer('mean', torch.zeros(3).double())
        self.drawn = []
    def forward(self, p, y):
        self.drawn.append((torch.rand(()).item(),random.random(),np.random.rand()))
        self.mean.mul_(0.9).add_(p.detach().mean(0), alpha=0.1)
        return F.cross_entropy(p*(1+self.mean), y)

def test_that_a_loss_was_tried_is_not_seen_in_it():
    "A fit that does not accumulate tries nothing"
    def run(n):
        set_seed(0)
        learn = toy(4, n=32, loss_func=Keeps())
        learn.fit(2, 0., cbs=GradientAccumulation(n))
        return learn.loss_func.drawn,learn.loss_func.mean
    assert deviation(run(4), run(16))<1e-12

# Warned, and with the remedy the same

remembers = dict(model=lambda: Remembers(5, 3).double(), splitter=all_params, cbs=resets('before_train'))
warned = dict(
    hidden_mean=([loss], dict(tokens=True, loss_func=Masked()), dict(acc=dict(n_items=not_ignored))),
    sum_for_mean=([loss], dict(loss_func=summed, fit=little), sums),
    mixed=([loss], dict(n=64, make=partial(mixable, loss=SumForMean), cbs=lambda: [Mix()], fit=little),
        dict(make=mixable)),
    batchnorm=([batchnorm], dict(model=normed), dict(cbs=lambda: [FreezeBN()])),
    untracked=([batchnorm], dict(model=lambda: layers(nn.BatchNorm1d(6, track_running_stats=False)),
        cbs=lambda: [RecordAt('before_train', lambda l: l.model[1].eval())]), dict(model=sample_norms)),
    both=([loss,batchnorm], dict(model=normed, loss_func=summed, fit=little), dict(cbs=lambda: [FreezeBN()], **sums)),
    state=([state], remembers, dict(cbs=resets('before_batch'))),
    state_where_split=([state], dict(remembers, micro=16, acc=dict(micro_batch_size=4)), dict(cbs=list, model=layers)))

@pytest.mark.parametrize('nm', warned)
def test_a_warning_is_true_and_its_remedy_mends_it(nm):
    keys,kwargs,remedy = warned[nm]
    said,a,b = run(**kwargs)
    assert said==dict.fromkeys(keys, 1) and off(a, b)>1e-4
    said,*fits = run(**dict(kwargs, **remedy))
    assert not said and assert_same_run(*fits)

@pytest.mark.parametrize('f', [adds,adds_in_place,adds_of_predictions])
def test_a_penalty_on_a_sum_is_told_and_counts_once_a_step(f):
    said,*fits = run(cbs=lambda: [RecordAt('after_loss', f)], **sums)
    assert said=={penalised:1} and assert_same_run(*fits)

words = {loss:('off by 0.', "reduction='mean'", '`n_items=`', 'GradientCache'), state:('Remembers', 'step to step'),
    batchnorm:('2 BatchNorm layers', '4 samples', '16 of a step')}

def all_three():
    def model(): return nn.Sequential(Remembers(5, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)).double()
    learn = toy(4, n=64, model=model, loss_func=summed, splitter=all_params)
    learn.model.reset = learn.model[0].reset
    return learn

def test_each_is_said_once_a_fit_and_again_in_the_next_with_what_to_do():
    learn,acc = all_three(),GradientAccumulation(16)
    for _ in range(2):
        with pytest.warns(AccumulationWarning) as said: learn.fit(2, 1e-5, cbs=acc)
        for k,vs in words.items():
            text, = [str(o.message) for o in said if o.category.__name__==k[0]]
            assert all(v in text for v in vs)

def test_each_is_silenced_by_its_category_and_all_by_one():
    learn,kinds = all_three(),{c.__name__:c for c in AccumulationWarning.__subclasses__()}
    def silenced(*cs):
        def fit():
            for c in cs: warnings.filterwarnings('ignore', category=c)
            learn.fit(1, 1e-5, cbs=GradientAccumulation(16))
        return set(count_warnings(fit))
    assert silenced()==set(words) and not silenced(AccumulationWarning)
    for k in words: assert silenced(kinds[k[0]])==words.keys()-{k}
    with weights_unchanged(learn), pytest.raises(AccumulationWarning), collect_warnings('error'):
        learn.fit(1, 1e-5, cbs=GradientAccumulation(16))

class Within(nn.Sequential):
    "Code of the user's between the fit and what is warned of"
    def __init__(self): super().__init__(Remembers(5, 3).double()); self.reset = self[0].reset
    def forward(self, x): return super().forward(x)

def short(): return layers(LimitedMemory(runs_out_above(5, 'forward')))

places = dict(
    first_step=lambda: toy(4, model=normed).fit(1, cbs=GradientAccumulation(16)),
    one_cycle=lambda: toy(4, model=normed).fit_one_cycle(1, cbs=GradientAccumulation(16)),
    before_fit=lambda: toy(16).fit(1, cbs=GradientAccumulation(8)),
    model=lambda: toy(4, model=Within, splitter=all_params).fit(1, cbs=GradientAccumulation(16)),
    memory=lambda: toy(16, model=short).fit(1, cbs=GradientAccumulation(16, True, 'auto')),
    schedule=lambda: toy(4).fit(1, cbs=GradientAccumulationSchedule(8, 16, finish=5)),
    nothing_to_freeze=lambda: toy(4).fit(2, cbs=FreezeBN()),
    fresh=lambda: toy(4, model=partial(normed, 0.)).fit(2, cbs=FreezeBN()))

@pytest.mark.parametrize('nm', places)
def test_a_warning_comes_once_and_points_at_the_line_that_fits(nm):
    "Not at a line of ours, nor of the user's model, from which we are called"
    with collect_warnings() as said: places[nm]()
    o, = [o for o in said if '.html#' in str(o.message)]
    assert o.filename==__file__ and re.search(r'\.fit\w*\(', linecache.getline(o.filename, o.lineno))

@pytest.mark.parametrize('action', ['default','module','once'])
def test_one_line_shows_each_of_its_warnings_where_the_same_is_shown_once(action):
    with collect_warnings(action) as said: all_three().fit(1, 1e-5, cbs=GradientAccumulation(16))
    kinds = Counter(o.category.__name__ for o in said if issubclass(o.category, AccumulationWarning))
    assert kinds==dict.fromkeys([nm for nm,_ in words], 1)

# Loaders

class Says(BatchListLoader):
    "A loader of one's own, which says that it has `n` batches, of 4 samples"
    after_batch,bs = None,4
    def __init__(self, batches, n=None): super().__init__(toy_data(64), [batches]); self.n = n or len(batches)
    def __len__(self): return self.n

fours,twos,sixes = (in_chunks(list(range(64)), n) for n in (4,2,6))
loaders = dict(right=('', True, fours), fewer_than_it_says=('', True, fours, 20), smaller=('', True, twos),
    empty_batches=('', True, [[], *fours[:6], [], *fours[6:], []]),
    more_than_it_says=('more-batches', False, fours, 10), more_whole_steps=('more-batches', True, fours, 8),
    larger_than_it_says=('larger-batches', False, sixes))

@pytest.mark.parametrize('nm', loaders)
def test_loaders_that_are_not_as_they_say(nm):
    (key,same,*args),a,b = loaders[nm],toy(16, n=64),toy(4, n=64)
    b.dls.loaders[0] = Says(*args)
    fit(a, None)
    assert count_warnings(lambda: fit(b, GradientAccumulation(16)))==({('',key):1} if key else {})
    assert off(a, b)<1e-9 if same else off(a, b)>1e-4

@pytest.mark.parametrize('key,bs,acc,big', [('larger-than-a-step', 16, GradientAccumulation(8), 16),
    ('schedule-cut-short', 4, GradientAccumulationSchedule(8, 8, finish=5), 8)])
def test_what_may_not_be_meant_is_told_and_the_run_is_what_the_warning_says(key, bs, acc, big):
    a,b = toy(big),toy(bs)
    fit(a, None)
    assert count_warnings(lambda: fit(b, acc))=={('',key):1}
    assert off(a, b)<1e-7 and len(a.recorder.losses)==len(b.recorder.losses)

texts = [torch.randint(2, 9, (12,), generator=gen) for _ in range(64)]

@pytest.mark.parametrize('shuffle', [False,True])
def test_a_sorted_loader_is_warned_of_if_it_shuffles_and_only_then_the_run_is_another(shuffle):
    def run(bs, cbs):
        set_seed(0)
        dl = SortedDL([(o,int(o[0])%2) for o in texts], bs=bs, shuffle=shuffle, res=list(range(64)))
        learn = Learner(DataLoaders(dl, dl), nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(36, 2)).double(),
            CrossEntropy(), opt_func=SGD, cbs=Float32Loss())
        with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.1, cbs=cbs)
        return learn
    a,b = run(16, None),[]
    assert count_warnings(lambda: b.append(run(4, GradientAccumulation(16))))==({order:1} if shuffle else {})
    assert (off(a, b[0])>1e-7)==shuffle

# Other sizes, and fits within fits

@pytest.mark.parametrize('epochs', [False,True])
@pytest.mark.parametrize('nm', ['accum_bs','n_acc'])
def test_another_size_holds_from_the_next_fit_or_epoch(nm, epochs):
    def run(learn, of, nm):
        learn.fit_one_cycle(2, 0.1, cbs=[RecordAt('after_epoch', lambda l: epochs and setattr(of, nm, 8))])
        setattr(of, nm, 8)
        learn.fit(1, 0.1)
        return learn
    acc,big = GradientAccumulation(16),toy(16, n=64)
    assert_same_run(run(big, big.dls.train, 'bs'), run(toy(4, n=64, cbs=acc), acc, nm))
