"Callbacks of ours that meet on a Learner."
import pickle
import pytest
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from fastaccum import FreezeBN, GradientAccumulation, GradientCache, NoiseScale, ScaledLR
from fastaccum.core.instead import Instead
from fastaccum.testing import toy

def own(learn):
    "What is in the place of methods of the Learner and its model"
    return [(o,nm) for o in (learn,*learn.model.modules()) for nm,f in vars(o).items()
            if nm in ('forward','one_batch','_do_one_batch','_backward','_step','backward') and callable(f)]

def mixed(bs, cbs):
    "In single precision, as MixUp's draws are"
    learn = toy(bs, n=64, model=lambda: nn.Sequential(nn.Linear(5,8), nn.Tanh(), nn.Linear(8,3)),
        splitter=lambda m: [list(m.parameters())], loss_func=CrossEntropyLossFlat(), cbs=cbs)
    ds = learn.dls.train_ds
    ds.tensors = ds.tensors[0].float(),ds.tensors[1]
    return learn

def test_both_leave_the_learner():
    "The one that came last leaves last"
    learn = toy(16)
    for _ in range(2):
        learn.fit(1, 0.1, cbs=[GradientCache(4),GradientAccumulation(32, micro_batch_size=16)])
        assert not own(learn)

def test_instead_comes_again_below_another():
    class Greeter:
        def greet(self): return 'hello'
    o = Greeter()
    a,b,c = (Instead(o, 'greet', None) for _ in range(3))
    for i,s in ((a,'1'),(b,'2'),(c,'3')): i.f = lambda i=i,s=s: i.stock()+s
    for i in (a,b,c,a,b,c): i.enter()
    assert o.greet()=='hello123'
    for i,left in ((b,'hello13'),(a,'hello3'),(b,'hello3'),(c,'hello')):
        i.leave()
        assert o.greet()==left
    assert not vars(o)

class Louder:
    def __init__(self): self.instead = None
    def greet(self): return 'hello'
    def shout(self): return self.instead.stock()+'!'

def test_instead_leaves_in_any_order_after_loading():
    o,a,b = Louder(),Louder(),Louder()
    a.instead,b.instead = Instead(o, 'greet', a.shout),Instead(o, 'greet', b.shout)
    a.instead.enter()
    b.instead.enter()
    o,a,b = pickle.loads(pickle.dumps((o,a,b)))
    a.instead.leave()
    b.instead.leave()
    assert o.greet()=='hello' and not {'greet'}&vars(o).keys()

@pytest.mark.parametrize('cbs', [lambda: [NoiseScale()], lambda: [NoiseScale(),ScaledLR(8, 'adascale')]],
    ids=['meter','adascale'])
def test_the_meter_takes_no_part_in_trials(cbs):
    learn = toy(16, cbs=[GradientAccumulation(32),*cbs()])
    assert learn.twin_check().ok and learn.twin_check(steps=2).ok
    assert int(learn.bs_find(max_trials=2))

def test_cache_refuses_what_would_split_its_batches():
    "Only the first part would have been cached"
    learn = toy(16)
    with pytest.raises(ValueError, match=r'micro_batch_size=8.*to see whole'):
        learn.fit(1, cbs=[GradientCache(4),GradientAccumulation(32, micro_batch_size=8)])
    assert not own(learn)
    learn.fit(1, cbs=[GradientCache(4),GradientAccumulation(32, micro_batch_size=16)])

@pytest.mark.parametrize('accum_bs,micro,ok', [(16,4,True),(16,'auto',True),(32,4,False),(16,16,False)], ids=str)
def test_check_splits_where_the_fit_does(accum_bs, micro, ok):
    "MixUp has the whole batch before it is split"
    learn = mixed(16, [MixUp(),GradientAccumulation(accum_bs, micro_batch_size=micro)])
    res = learn.twin_check()
    assert res.ok==ok and (res.off['callbacks']<1e-4)==ok

class Neighbours(nn.Module):
    "A loss that compares the samples of a batch"
    def forward(self, pred, y): return (pred@pred.T).logsumexp(1).mean()

def test_check_of_a_split_sees_the_loss():
    learn = toy(16, loss_func=Neighbours(), cbs=[GradientAccumulation(16, micro_batch_size=4)])
    res = learn.twin_check()
    assert not res.ok and res.off['loss']>1e-3 and res.off['gradients']>1e-3

def test_cache_leaves_a_fit_that_ends_in_an_epoch():
    "A cancelled fit has no `after_train`"
    learn = toy(16, n=160, cbs=GradientCache(4))
    learn.lr_find(num_it=5, show_plot=False)
    assert not own(learn)

@pytest.mark.parametrize('make,exc', [(lambda v: GradientCache(4, split=v),TypeError), (FreezeBN,TypeError),
    (lambda v: ScaledLR(16, beta_range=v),ValueError)], ids=['split','part','beta_range'])
@pytest.mark.parametrize('v', [0,1.5,(.5,)], ids=str)
def test_wrong_arguments_fail_at_once(make, exc, v):
    with pytest.raises(exc, match='=.*: give'): make(v)

def test_half_precision_in_several_cached_batches():
    "What is replayed belongs to its own batch, and is weighed with it"
    class Half(Callback):
        def before_batch(self): self.learn.xb = tuple(x.bfloat16() for x in self.learn.xb)
    class Note(Callback):
        order = 20
        def before_step(self): self.learn.noted = [p.grad.float() for p in self.learn.model.parameters()]
    def grads(bs, *cbs):
        learn = mixed(bs, [Half(),Note(),*cbs])
        learn.model.bfloat16()
        learn.fit(1, 0., cbs=GradientAccumulation(32))
        return learn.noted
    a,b = grads(16),grads(16, GradientCache(6))
    assert all((x-y).norm()<2e-2*x.norm() for x,y in zip(a, b))
