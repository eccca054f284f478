"What a mean loss is a mean of: padding, class weights, sums, sizes of your own."
import pytest, torch
from functools import partial
from types import SimpleNamespace
from torch import nn, tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.callback.core import Callback
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam
from fastai.callback.tracker import TerminateOnNaNCallback
from fastaccum import GradientAccumulation
from fastaccum.core import sizes
from fastaccum.core.macro_batch import MacroBatch
from fastaccum.core.measure import Measure
from fastaccum.core.sizes import find_size
from fastaccum.testing import CrossEntropy, assert_twins, deviation, toy, toy_data, twins
from common import Seen, grads, weights

w = tensor([0.2,1.,5.], dtype=torch.float64)

class Masked(nn.Module):
    "A loss of one's own with an `ignore_index`: 0/0 and NaN gradients where everything is ignored"
    ignore_index = -100
    def forward(self, p, y):
        mask = y!=-100
        each = F.cross_entropy(p.flatten(0, -2), y.flatten().clamp(min=0), reduction='none')
        return (each*mask.flatten()).sum()/mask.sum()

losses = dict(module=CrossEntropy, weighted=lambda: CrossEntropy(weight=w),
    smoothed=lambda: CrossEntropy(label_smoothing=0.1),
    weighted_smoothed=lambda: CrossEntropy(weight=w, label_smoothing=0.1),
    other_index=lambda: CrossEntropy(ignore_index=2),
    own=Masked, summed=lambda: CrossEntropy(reduction='sum'))

@pytest.mark.parametrize('loss', losses)
@pytest.mark.parametrize('n', [64,70])
def test_loss_twins(loss, n):
    a,b = twins(n=n, tokens=loss!='other_index', loss_func=losses[loss](),
        fit=lambda l,cbs: l.fit_one_cycle(2, 1e-3, cbs=cbs))
    assert_twins(a, b)

def test_flat_loss_twins():
    "fastai's own wrapper (in single precision, to which it casts)"
    for kwargs in (dict(), dict(weight=w.float()), dict(ignore_index=1)):
        a,b = twins(n=70, tokens='ignore_index' not in kwargs, loss_func=CrossEntropyLossFlat(**kwargs))
        assert_twins(a, b, tol=1e-5, loss_tol=1e-5)

def test_functional_loss_twins():
    def ce(p, y): return F.cross_entropy(p, y)
    for f in (F.cross_entropy, partial(F.cross_entropy, ignore_index=1), partial(F.cross_entropy, weight=w)):
        a,b = twins(n=70, loss_func=f)
        assert_twins(a, b)

def test_class_weights_that_somebody_writes_to_are_looked_at_again():
    ws,measure = torch.ones(3),Measure()
    for x in (1.,3.):
        ws.fill_(x)
        measure.look_at(nn.CrossEntropyLoss(weight=ws))
        assert measure.find.mean_weight==x

def test_a_loss_function_that_is_replaced_while_training():
    "fastai's MixUp and CutMix replace the Learner's loss function when training begins, and put it back afterwards"
    class Replace(Callback):
        order = 90
        def before_train(self): self.old,self.learn.loss_func = self.learn.loss_func,CrossEntropy(weight=w)
        def after_train(self): self.learn.loss_func = self.old
    a,b = twins(n=70, tokens=True, cbs=lambda: [Replace()])
    assert_twins(a, b)

def test_class_probabilities_are_a_mean_over_samples():
    """Cross-entropy with floating point targets, as label mixing makes them: torch divides by samples, also with
    class weights"""
    gen = torch.Generator().manual_seed(0)
    y = torch.rand(70, 3, generator=gen, dtype=torch.float64)
    y[::3,0] += 1
    ds = TensorDataset(toy_data(70).tensors[0], y)
    for kwargs in (dict(), dict(weight=w)):
        a,b = twins(data=ds, loss_func=nn.CrossEntropyLoss(**kwargs))
        assert_twins(a, b)

def ignored(which, n=64):
    "Token data in which the samples `which` are nothing but padding"
    ds = toy_data(n, tokens=True)
    ds.tensors[1][which] = -100
    return ds

@pytest.mark.parametrize('loss', ['module','smoothed','own','weighted'])
@pytest.mark.parametrize('log', [True,False])
def test_ignored_micro_batches_do_nothing(loss, log):
    """The first micro-batch of the epoch and one in the middle are nothing but padding: neither weights nor losses
    turn NaN"""
    ds = ignored(list(range(4))+list(range(24,28)))
    a,b = twins(data=ds, loss_func=losses[loss](), acc=dict(log_accum_batch=log),
        cbs=lambda: [TerminateOnNaNCallback()])
    assert deviation(weights(a), weights(b))<1e-7
    if log: assert_twins(a, b)
    assert len(b.recorder.losses)==(8 if log else 32) and not any(o.isnan() for o in b.recorder.losses)

@pytest.mark.parametrize('loss', ['module','smoothed','own'])
@pytest.mark.parametrize('which', [range(16), range(16,32), range(48,64)], ids=['first','second','last'])
def test_ignored_macro_batch_contributes_nothing(loss, which):
    "A whole macro-batch of padding: its step has a gradient of zero, its recorded loss is no NaN"
    seen = Seen('before_step', lambda l: (l.loss.item(), max(g.abs().max().item() for g in grads(l))), order=12)
    learn = toy(4, data=ignored(list(which)), loss_func=losses[loss]())
    learn.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(16),seen])
    assert len(seen.values)==8 and not weights(learn).isnan().any()
    assert not any(o.isnan() for o in learn.recorder.losses)
    for i,(l,g) in enumerate(seen.values):
        assert l==l and (g==0)==(i%4==which[0]//16)
        if i%4==which[0]//16: assert l==(seen.values[i-1][0] if i else 0)     # it repeats the last one known

@pytest.mark.parametrize('smooth', [0.,0.1])
def test_classes_with_a_weight_of_zero(smooth):
    """A micro-batch of nothing but such a class has a mean of 0/0, and NaN for a gradient; the big batch's run
    knows nothing of it"""
    ds = toy_data(64)
    ds.tensors[1][4:8] = ds.tensors[1][32:40] = 0
    zero = tensor([0.,1.,1.], dtype=torch.float64)
    a,b = twins(data=ds, loss_func=CrossEntropy(weight=zero, label_smoothing=smooth))
    assert not weights(b).isnan().any() and not any(o.isnan() for o in b.recorder.losses)
    if not smooth: assert_twins(a, b)   # smoothing has a share in the big batch's loss, which 0/0 cannot tell

def test_ignored_macro_batch_steps_like_its_twin():
    "Torch's cross-entropy has a zero gradient there, so the twin's weights can be compared: both only decay and coast"
    a,b = twins(data=ignored(list(range(16,32))), opt_func=Adam, cbs=list)
    assert deviation(weights(a), weights(b))<1e-7 and any(o.isnan() for o in a.recorder.losses)

def test_size_of_your_own():
    "A loss that is a mean over *something*: say of what"
    class PerWeight(nn.Module):
        def forward(self, p, y): return (F.mse_loss(p[...,0], y[...,0], reduction='none')*y[...,1]).sum()/y[...,1].sum()
    gen = torch.Generator().manual_seed(0)
    def data():
        return TensorDataset(torch.randn(70, 5, generator=gen.manual_seed(1), dtype=torch.float64),
            torch.rand(70, 2, generator=gen, dtype=torch.float64))
    def fit(l, cbs): l.fit_one_cycle(2, 0.05, cbs=cbs)
    for size in (lambda l: l.y[...,1].sum(), lambda l: l.y[...,1].sum().item()):
        a,b = twins(data=data(), loss_func=PerWeight(), acc=dict(size=size), fit=fit)
        assert_twins(a, b)
    a,b = twins(data=data(), loss_func=PerWeight(), fit=fit)     # by samples it is not
    assert deviation(weights(a), weights(b))>1e-5

def test_size_zero_is_left_out():
    "A size of 0, as a number: the micro-batch says nothing"
    zero = {2,5}
    acc = dict(size=lambda l: 0 if l.iter in zero else 4)
    class Nan(Callback):
        order,run_valid = -101,False
        def after_loss(self):
            if self.iter in zero:
                self.learn.loss_grad = self.loss_grad*float('nan')
                self.learn.loss = self.loss*float('nan')
    learn = toy(4, n=64)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(16, **acc), Nan()])
    a = toy(12, n=64)
    keep = [i for i in range(64) if i//4 not in zero]
    batches = [keep[:12],keep[12:24],keep[24:40],keep[40:]]
    a.dls.train.create_batches = lambda idxs: (a.dls.train.create_batch([a.dls.train.dataset[i] for i in b])
        for b in batches)
    a.dls.train.n = 48
    a.fit(1, 0.1)
    assert deviation(weights(a), weights(learn))<1e-12 and not any(l.isnan() for l in learn.recorder.losses)

@pytest.mark.parametrize('size,exc,msg', [(lambda l: -1, ValueError, '-1'), (lambda l: float('inf'), ValueError, 'inf'),
    (lambda l: True, TypeError, 'True'), (lambda l: '4', TypeError, "'4'"), (lambda l: None, TypeError, 'None'),
    (lambda l: tensor(-1.), ValueError, '-1'), (lambda l: tensor(float('nan')), ValueError, 'nan'),
    (lambda l: tensor([1,2]), TypeError, 'tensor')])
def test_bad_sizes_fail_before_a_weight_moves(size, exc, msg):
    learn = toy(4, n=64)
    before = weights(learn)
    with pytest.raises(exc, match=msg): learn.fit(1, 0.1, cbs=GradientAccumulation(16, size=size))
    assert weights(learn).equal(before)

@pytest.mark.parametrize('loss', [CrossEntropy, lambda: CrossEntropy(weight=w/1000)],
    ids=['plain','small class weights'])
def test_weights_stay_near_one_over_k(loss):
    """Raw sums over 64 sequences of 6 tokens would multiply the gradient by 384, and with small class weights by
    next to nothing"""
    learn = toy(4, n=64, tokens=True, loss_func=loss())
    ws = []
    class W(Callback):
        order,run_valid = 5.5,False
        def before_backward(self): self.before = self.loss_grad.detach()
    class V(Callback):
        order,run_valid = -50,False
        def after_backward(self): ws.append((self.loss_grad.detach()/self.w.before).item())
    learn.fit(1, 0.1, cbs=[GradientAccumulation(64), W(), V()])
    assert len(ws)==16 and max(ws)<=3/16 and min(ws)>1/16/6/3

def test_weights_are_one_over_k_with_class_probabilities():
    "They are a mean over samples: with 1000 classes, shares a thousand times too small would be lost in half precision"
    x,y = torch.randn(64, 5, dtype=torch.float64),torch.randn(64, 3, dtype=torch.float64).softmax(1)
    shares = []
    class W(Callback):
        order,run_valid = GradientAccumulation.order+.5,False
        def before_backward(self): shares.append(self.gradient_accumulation.weight)
    for weight in (None,w):
        learn = toy(4, data=TensorDataset(x, y), loss_func=nn.CrossEntropyLoss(weight=weight))
        learn.fit(1, 0.1, cbs=[GradientAccumulation(64), W()])
    assert shares==[1/16]*32

@pytest.mark.parametrize('host', [True,False])
def test_sizes_are_counted_in_single_precision_at_least(host, monkeypatch):
    "Half precision ends at 65504: more targets than that must not count as infinitely many, nor their losses"
    monkeypatch.setattr(sizes, 'on_host', lambda t: host)
    loss = torch.full((), 3., dtype=torch.float16)
    learn = SimpleNamespace(loss_func=F.cross_entropy, pred=None, yb=(torch.zeros(70_000, dtype=torch.long),),
        loss=loss, loss_grad=loss)
    measure,macro = Measure(),MacroBatch()
    macro.start(70_000, 70_000)
    size,most,loss = measure(learn, 70_000)
    macro.weight(70_000, size, most)
    macro.add(70_000, size, loss)
    assert isinstance(size, int if host else torch.Tensor) and size==70_000
    assert measure.mean(macro)==3 and measure.mean(macro).dtype==torch.float16

def test_losses_of_samples_are_added_up_in_single_precision_at_least():
    "So they are with a loss that is a mean over samples: 4096 of them with a loss of 20 are more than 65504"
    loss = torch.full((), 20., dtype=torch.float16)
    learn = SimpleNamespace(loss_func=F.mse_loss, loss=loss, loss_grad=loss)
    measure,macro = Measure(),MacroBatch()
    macro.start(4096, 4096)
    for _ in range(4):
        size,most,loss = measure(learn, 1024)
        macro.weight(1024, size, most)
        macro.add(1024, size, loss)
    assert measure.mean(macro)==20 and measure.mean(macro).dtype==torch.float16

shapes = dict(nothing=[], some=[0,1,7], all=list(range(12)))

@pytest.mark.parametrize('which', shapes)
@pytest.mark.parametrize('kwargs', [dict(),dict(weight=w),dict(ignore_index=1),dict(ignore_index=1, weight=w),
    dict(ignore_index=7)], ids=str)
def test_what_is_counted_on_a_device_is_counted_on_the_host(kwargs, which, monkeypatch):
    "The oracle is torch: what its mean divides its sum by"
    gen = torch.Generator().manual_seed(0)
    y,pred = torch.randint(0, 3, (3,4), generator=gen),torch.randn(12, 3, generator=gen, dtype=torch.float64)
    y.view(-1)[shapes[which]] = kwargs.get('ignore_index', -100)
    find = find_size(nn.CrossEntropyLoss(**kwargs))
    def count(host):
        monkeypatch.setattr(sizes, 'on_host', lambda t: host)
        return find(SimpleNamespace(yb=(y,)))
    def loss(reduction): return nn.CrossEntropyLoss(**kwargs, reduction=reduction)(pred, y.flatten())
    here,there = count(True),count(False)
    assert isinstance(here, (int,float)) and isinstance(there, torch.Tensor) and here==there
    if here: assert abs(loss('sum')/loss('mean')-here)<1e-12
    else: assert loss('mean').isnan()

@pytest.mark.parametrize('host', [True,False])
@pytest.mark.parametrize('weighted', [False,True])
def test_targets_of_eight_bits(weighted, host, monkeypatch):
    "As masks have them: in 8 bits the default `ignore_index` of -100 would be the class 156"
    monkeypatch.setattr(sizes, 'on_host', lambda t: host)
    gen = torch.Generator().manual_seed(0)
    y = torch.randint(0, 200, (64,), generator=gen, dtype=torch.uint8)
    y[:9] = 156
    pred = torch.randn(64, 200, generator=gen, dtype=torch.float64)
    weight = torch.rand(200, generator=gen, dtype=torch.float64)
    kwargs = dict(weight=weight) if weighted else {}
    n = find_size(nn.CrossEntropyLoss(**kwargs))(SimpleNamespace(yb=(y,)))
    assert abs(F.cross_entropy(pred, y, **kwargs, reduction='sum')/F.cross_entropy(pred, y, **kwargs)-n)<1e-12

def test_no_targets_at_all():
    find = find_size(nn.CrossEntropyLoss())
    assert find(SimpleNamespace(yb=(torch.zeros(4, 0, dtype=torch.long),)))==0

def test_on_a_device_few_operations_count():
    "Each is a kernel that is launched; plain cross-entropy asks for two, a class weight for five"
    from torch.utils._python_dispatch import TorchDispatchMode
    class Count(TorchDispatchMode):
        n = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += func.overloadpacket not in (torch.ops.aten.detach,torch.ops.aten._to_copy)
            return func(*args, **(kwargs or {}))
    y = torch.zeros(8, dtype=torch.long)
    for kwargs,most in ((dict(),2),(dict(weight=w),5)):
        find = find_size(nn.CrossEntropyLoss(**kwargs))
        with pytest.MonkeyPatch.context() as mp:
            mp.setattr(sizes, 'on_host', lambda t: False)
            with Count() as seen: find(SimpleNamespace(yb=(y,)))
        assert seen.n<=most
