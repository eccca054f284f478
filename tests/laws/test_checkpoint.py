"`ActivationCheckpoint`: fewer activations are held, and the run is to the bit the one without it, BatchNorm and dropout included."
import numpy as np, pytest, random, torch, warnings
from copy import deepcopy
from functools import partial
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torchvision.models.resnet import BasicBlock
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.hook import hook_output
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip
from fastai.layers import SequentialEx
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.torch_core import TensorBase, TensorImage
from fastcore.foundation import L
from fastaccum import ActivationCheckpoint, GradientAccumulation
from fastaccum.testing import assert_twins, deviation, toy, toy_data
from common import CpuMixedPrecision, Raise, Seen, some
from small_learners import Held, Holds, applications, cross_entropy, frozen, make, replaced

pytestmark = pytest.mark.usefixtures('frozen')

class Block(nn.Module):
    "BatchNorm, dropout, something in place, and a skip"
    def __init__(self, n=8, norm=None):
        super().__init__()
        self.lin1,self.lin2 = nn.Linear(n, n),nn.Linear(n, n)
        self.norm,self.act,self.drop = nn.BatchNorm1d(n) if norm is None else norm,nn.ReLU(inplace=True),nn.Dropout()
    def forward(self, x): return x+self.lin2(self.drop(self.act(self.norm(self.lin1(x)))))

def net(*blocks): return nn.Sequential(nn.Linear(5, 8), *(blocks or [Block() for _ in range(3)]), nn.BatchNorm1d(8), nn.Linear(8, 3))
def small(model=net, **kwargs):
    return toy(8, **dict(dict(n=24, model=lambda: model().double(), splitter=lambda m: [[*m.parameters()]]), **kwargs))

def one_cycle(learn, cbs): learn.fit_one_cycle(1, 1e-2, cbs=cbs)
def state(l):
    "All that a run has moved"
    grads = [p.grad.clone() for p in l.model.parameters() if p.grad is not None]
    rng = torch.get_rng_state(),np.random.get_state()[1].astype(int),random.getstate()
    return [o.clone() for o in l.model.state_dict().values()],grads,[getattr(l.recorder, o) for o in ('losses','values','lrs')],rng

def run(make, cbs, fit=one_cycle):
    learn = make()
    for seed in (torch.manual_seed,random.seed,np.random.seed): seed(1)
    fit(learn, cbs)
    return learn

def check(make=small, cbs=list, fit=one_cycle, **kwargs):
    "The run with checkpoints is the one without; returns both Learners, and the callback"
    a,cb = run(make, cbs(), fit),ActivationCheckpoint(**kwargs)
    want = state(a)
    b = run(make, [cb,*cbs()], fit)
    assert deviation(state(b), want)==0 and len(b.recorder.losses)>1 and replaced(b)==replaced(a) and not cb.recomputing
    assert all(o.calls for o in cb.segments)
    return a,b,cb

# What is computed again is what was there

@pytest.mark.parametrize('nm', [o for o in applications if o!='wgan'])
def test_applications(nm):
    if nm in ('bert','gpt2'): pytest.importorskip('transformers')
    kinds = dict(unet={'BasicBlock','UnetBlock','ResBlock'}, vision={'BasicBlock'}, text_classifier={'WeightDropout'},
        language_model={'WeightDropout'}, bert={'BertLayer'}, gpt2={'GPT2Block'}).get(nm, set())
    def learner(): return make(nm, 0.1, loss_func=cross_entropy)
    a,b,cb = check(learner, offload=nm in ('unet','language_model'))
    assert {o.kind for o in cb.segments}>=kinds and len(cb.segments)>1
    if nm=='language_model':
        check(learner, segments=AWD_LSTM)
        assert str(a.model[0].hidden)==str(b.model[0].hidden)
    if nm=='unet': assert all(x.stored.equal(y.stored) for x,y in zip(a.model.sfs, b.model.sfs))   # by its hooks

class Own(nn.Linear):
    "Depends on buffers that it moves, one in place, on what it keeps, and on numbers from four generators"
    def __init__(self):
        super().__init__(8, 8)
        self.n,self.seen,self.last,self.gen = 0,[],0,torch.Generator().manual_seed(0)
        self.register_buffer('mean', None)
        self.register_buffer('sums', torch.zeros(()))
    def forward(self, x):
        self.n += 1
        self.seen.append(random.random()+np.random.rand()+torch.rand(1).item()+torch.rand(1, generator=self.gen).item())
        self.mean = x.detach().mean(0) if self.mean is None else .9*self.mean+.1*x.detach().mean(0)
        self.sums.add_(1)
        old,self.last = self.last,x.detach().mean()
        return super().forward(x-self.mean).sin()*self.n/float(self.sums)+self.seen[-1]+len(self.seen)+old

class Late(nn.BatchNorm1d):
    "Goes by the statistics that it has just moved"
    def forward(self, x): return super().forward(x)*self.running_var.clone()+self.running_mean

class Twice(nn.Module):
    "Runs its block three times"
    def __init__(self, m):
        super().__init__()
        self.m,self.other = m,Block()
    def forward(self, x): return self.m(self.other(self.m(x))+self.m(x*2))

moving = dict(cumulative=lambda: Block(norm=nn.BatchNorm1d(8, momentum=None)), late=lambda: Block(norm=Late(8)), own=Own,
    instance=lambda: Block(norm=nn.Sequential(nn.Unflatten(1, (2,4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())),
    spectral=lambda: Block(norm=parametrizations.spectral_norm(nn.Linear(8, 8))),
    old_spectral=lambda: Block(norm=spectral_norm(nn.Linear(8, 8))), weight_norm=lambda: Block(norm=parametrizations.weight_norm(nn.Linear(8, 8))))

@pytest.mark.parametrize('twice', [False,True])
@pytest.mark.parametrize('nm', moving)
def test_what_moves_in_a_forward_pass_moves_once(nm, twice):
    def model(): return net(*([Twice(moving[nm]())] if twice else [moving[nm](), moving[nm]()]))
    a,b,cb = check(partial(small, model), segments=(Block,Own))
    owns = [[o for o in l.model.modules() if isinstance(o, Own)] for l in (a,b)]
    for x,y in zip(*owns): assert (x.n,x.seen,x.last)==(y.n,y.seen,y.last) and x.gen.get_state().equal(y.gen.get_state())

class Through(nn.Module):
    "Blocks that are given things by name, in lists and dicts, to which they add; tensors with a class, and attributes"
    def __init__(self, cls):
        super().__init__()
        class Takes(Block):
            def forward(self, x, *, more=(), outs):
                outs.append(x.detach().mean())
                return super().forward(x*len(outs)+more[0]['bias']+sum(outs)),len(more)
        class Merge(Block):
            def forward(self, x): return super().forward(x*x.orig)
        self.cls,self.embed,self.bias,self.head = cls,nn.Linear(5, 8),nn.Parameter(torch.ones(8)),nn.Linear(8, 3)
        self.blocks,self.ex = nn.ModuleList(Takes() for _ in range(3)),SequentialEx(Block(), Merge())
    def forward(self, x):
        x,outs = self.embed(x),[]
        for m in self.blocks: x,_ = m(x, more=[dict(bias=self.bias)], outs=outs)
        return TensorBase(self.head(self.ex(x.as_subclass(self.cls))))

@pytest.mark.parametrize('cls', [TensorImage,torch.Tensor])
def test_inputs_of_all_kinds(cls): check(partial(small, partial(Through, cls)), segments=Block)

# With what else there is

class Event(Callback):
    "Call `f` with the Learner at `event`, in training"
    run_valid = False
    def __init__(self, event, f): setattr(self, event, lambda: f(self.learn))

class Penalty(Callback):
    "On the gradient of the inputs"
    run_valid = False
    def before_batch(self): self.learn.xb = (self.x.requires_grad_(),)
    def after_loss(self):
        g, = torch.autograd.grad(self.learn.loss_grad, self.x, create_graph=True)
        self.learn.loss_grad = self.learn.loss_grad+g.pow(2).sum()

def lr_find(learn, cbs):
    with learn.added_cbs(cbs):
        learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None)
        learn.fit_one_cycle(1, 1e-2)
def tune(learn, cbs): learn.fine_tune(1, 1e-2, freeze_epochs=2, cbs=cbs)
def two_groups(m): return [[*m[:3].parameters()],[*m[3:].parameters()]]

settings = dict(lr_find=dict(fit=lr_find), tune=dict(make=partial(small, splitter=two_groups), fit=tune),
    accumulated=dict(cbs=lambda: [GradientAccumulation(12, drop_last=False),GradientClip(.1)]),
    saved=dict(cbs=lambda: [SaveModelCallback()], fit=lambda l,cbs: l.fit(3, 1e-2, cbs=cbs)),
    modes=dict(cbs=lambda: [Event('after_pred', lambda l: l.model.eval()),Event('after_batch', lambda l: l.model.train())]),
    twice=dict(cbs=lambda: [Event('before_backward', lambda l: l.loss_grad.backward(retain_graph=True))]),
    penalty=dict(cbs=lambda: [Penalty()]), offload=dict(offload=True))

@pytest.mark.filterwarnings('ignore:.*BatchNorm')
@pytest.mark.parametrize('nm', settings)
def test_with_what_else_there_is(nm): check(**settings[nm])

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_mixed_precision(mode):
    "Computed again in the precision of the forward pass"
    seen,x,y = [],*toy_data(24).tensors
    def learner():
        learn = toy(8, data=torch.utils.data.TensorDataset(x.float(), y), model=net, splitter=lambda m: [[*m.parameters()]])
        learn.model[2].lin1.register_forward_hook(lambda m,i,o: seen.append(o.dtype) if learn.training else None)
        return learn
    check(learner, cbs=lambda: [CpuMixedPrecision(mode, init_scale=2.**8),GradientClip(.1)])
    assert set(seen)=={dict(fp16=torch.float16, bf16=torch.bfloat16)[mode]} and len(seen)==3+2*3

def test_hooks():
    "A segment's own hear each batch once; those of a module inside hear it twice, may alter it, and can ask"
    heard = []
    def learner():
        learn,mine = small(),[]
        heard.append(mine)
        def recomputing(): return hasattr(learn, 'activation_checkpoint') and learn.activation_checkpoint.recomputing
        def hear(m, i, o): mine.append((type(m).__name__,o[0].sum().item()))
        learn.model[1].act.register_forward_hook(lambda m,i,o: o*2)
        learn.model[2].register_forward_hook(hear)
        learn.model[2].norm.register_forward_hook(lambda m,i,o: None if recomputing() else hear(m, i, o))
        for m in (learn.model[1],learn.model[2].drop): m.register_full_backward_hook(hear)
        learn.model[2].lin2.weight.register_hook(lambda g: mine.append(g.norm().item()))
        learn.hook = hook_output(learn.model[3], detach=False)
        return learn
    a,b,_ = check(learner)
    assert heard[0]==heard[1] and len(heard[0])>=3*5 and a.hook.stored.equal(b.hook.stored)

def test_validation_runs_plainly():
    calls,cb = [],ActivationCheckpoint()
    learn = small()
    learn.model[1].lin1.register_forward_hook(lambda *_: calls.append((learn.training,cb.recomputing)))
    learn.fit(1, cbs=cb)
    assert calls==[(True,False),(True,True)]*3+[(False,False)] and [o.calls for o in cb.segments]==[3]*4

# Fewer activations are held

def stack(**kwargs):
    return toy(16, n=128, model=lambda: nn.Sequential(nn.Linear(5, 8), *(Holds(8) for _ in range(6)), nn.Linear(8, 3)).double(),
        splitter=lambda m: [[*m.parameters()]], **kwargs)

def test_activations_of_one_segment_are_held():
    def most(*cbs):
        Held.reset()
        stack().fit(1, cbs=cbs)
        assert Held.now==0
        return Held.most
    assert most()>=6*16 and most(ActivationCheckpoint())<=2*16

def test_larger_batches_fit():
    Held.reset(60)
    try: assert [int(stack(cbs=cbs).bs_find(show_plot=False, init_val=4)) for cbs in ([],[ActivationCheckpoint()])]==[8,32]
    finally: Held.reset()

@pytest.mark.parametrize('cap', [70,20])
@pytest.mark.filterwarnings('ignore')
def test_memory_that_runs_out_while_it_is_computed_again(cap):
    "The batch is split, and the step is that of the whole batch"
    want,learn = stack(),stack()
    want.fit(1, 1e-2)
    Held.reset(cap)
    try: learn.fit(1, 1e-2, cbs=[ActivationCheckpoint(),GradientAccumulation(16, micro_batch_size='auto')])
    finally: Held.reset()
    assert_twins(want, learn)

# Which segments

def test_segments_are_found_or_given():
    "The table says where they are, and after a fit how often they ran and what is kept for each"
    model = net().double()
    def is_one(m): return isinstance(m, Block) and m is not model[2]
    for given,names in [(Block,'123'),((Block,nn.BatchNorm1d),'1234'),([model[1],model[3]],'13'),(nn.ModuleList(model[1:3]),'12'),
        (L(model[3]),'3'),(is_one,'13')]:
        cb = ActivationCheckpoint(given)
        small(lambda: model).fit(1, cbs=cb)
        assert [o.name for o in cb.segments]==[*names] and [o.kept for o in cb.segments]==[8*8*8]*len(names)
        assert all(o in repr(cb.segments) for o in ('segment','kept MB',*names))
    learn = make('vision', loss_func=cross_entropy)
    found = learn.add_cb(ActivationCheckpoint()).activation_checkpoint.segments   # before any fit
    assert [o.kind for o in found].count('BasicBlock')==4 and [o.calls for o in found]==[0]*len(found)
    assert len(ActivationCheckpoint(BasicBlock).segments)==0
    class Stage(nn.Sequential):
        def forward(self, x): return self[1](self[0](x))
    assert [o.name for o in check(partial(small, lambda: net(Stage(Block(), Block()))))[2].segments][:2]==['1.0','1.1']

@pytest.mark.parametrize('segments', [3,(),[],(1,),[nn.Linear(1, 1),3],[None],{}], ids=str)
def test_arguments(segments):
    with pytest.raises(TypeError, match='segments=.*give a class'): ActivationCheckpoint(segments)
    with pytest.raises(TypeError, match='offload=1'): ActivationCheckpoint(offload=1)

def wrapped(wrap):
    learn = small()
    learn.model = wrap(learn.model)
    return learn

@pytest.mark.parametrize('make,cbs,match', [(small,lambda l: [nn.LSTM],'Block'), (small,lambda l: [lambda m: False],'Block'),
    (small,lambda l: [[nn.Linear(1, 1)]],'Linear'), (small,lambda l: [[l.model[1],l.model[1].norm]],"'1' and '1.norm'"),
    (partial(small, lambda: nn.Linear(5, 3)),lambda l: [None],'no segments'), (small,lambda l: [None,Block],'two ActivationCheckpoint'),
    (partial(wrapped, nn.DataParallel),lambda l: [None],'DataParallel'),
    (partial(wrapped, partial(torch.compile, backend='eager')),lambda l: [None],'compiled')])
def test_what_cannot_be_cut_is_refused_before_it_trains(make, cbs, match):
    learn = make()
    before,own = deepcopy(learn.model.state_dict()),replaced(learn)
    with pytest.raises(ValueError, match=match): learn.fit(1, cbs=[ActivationCheckpoint(o) for o in cbs(learn)])
    assert all(v.equal(before[k]) for k,v in learn.model.state_dict().items()) and replaced(learn)==own

class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed,self.used,self.idle,self.head = nn.Linear(5, 8),Block(),Block(),nn.Linear(8, 3)
    def forward(self, x): return self.head(self.used(self.embed(x)))

def test_a_segment_of_yours_that_does_not_run_is_told():
    with pytest.warns(UserWarning, match="1 of 2 segments did not run.*'idle'"): small(Idle).fit(1, cbs=ActivationCheckpoint(Block))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        small(Idle).fit(1, cbs=ActivationCheckpoint())   # found, not given: the head of a timm model, for one

class Shift(nn.Module):
    "Needs no input for its own backward pass"
    def __init__(self):
        super().__init__()
        self.bias,self.lin = nn.Parameter(torch.ones(8)),nn.Linear(8, 8)
    def forward(self, x): return self.lin(x+self.bias)

class Later(nn.Module):
    "Changes the input of its block, which without checkpoints may be done"
    def __init__(self):
        super().__init__()
        self.lin,self.block = nn.Linear(8, 8),Shift()
    def forward(self, x):
        x = self.lin(x)
        return self.block(x)+x.mul_(2)

@pytest.mark.parametrize('block,cbs', [(Later,[]), (lambda: Twice(Shift()),[Event('before_backward', lambda l: l.model[1].m.bias.detach().mul_(2))])],
    ids=['input','parameter'])
def test_what_is_changed_before_it_is_computed_again_is_refused(block, cbs):
    learn = small(lambda: net(block(), Block()))
    with pytest.raises(RuntimeError, match=r"(input|parameter) of segment '1\.\w+'.* changed"): learn.fit(1, cbs=[ActivationCheckpoint(Shift),*cbs])
    assert not replaced(learn)
    small(lambda: net(block(), Block())).fit(1)

# Nothing is left

class Fault(Exception): pass
cases = [(e,x,s) for e in ('before_fit','before_epoch','after_pred','before_backward','after_step','after_fit')
    for x in (CancelFitException,Fault,KeyboardInterrupt) for s in (False,True)]

@pytest.mark.parametrize('event,exc,stays', some(12, cases))
def test_interrupts_leave_nothing(event, exc, stays):
    cb,fault = ActivationCheckpoint(),Raise(event, exc, order=99)
    learn = small(cbs=[cb] if stays else None)
    try: learn.fit(1, 1e-2, cbs=[fault] if stays else [cb,fault])
    except exc: pass   # raised in `after_fit`, also what cancels the fit
    assert fault.raised and not cb.recomputing and (stays or not replaced(learn))
    learn.validate()
    twin = small()
    twin.model.load_state_dict(learn.model.state_dict())
    for o in (twin,learn):
        torch.manual_seed(2)
        o.opt = None
        o.fit(1, 1e-2)
    assert deviation(twin.model.state_dict(), learn.model.state_dict())==0 and not replaced(learn)

@pytest.mark.parametrize('exc', [Fault,KeyboardInterrupt])
def test_an_interrupt_while_it_is_computed_again(exc):
    "Buffers, what modules keep, and generators are as before the backward pass"
    cb,notes = ActivationCheckpoint((Block,Own)),[]
    def fail(*_):
        if cb.recomputing: raise exc
    learn = small(lambda: net(Own(), Block(), Block()))
    for m in learn.model[1:4]: m.register_forward_pre_hook(fail), [o.register_forward_hook(fail) for o in m.children()]
    def note(l): notes.append(str((l.model.state_dict(),random.getstate(),torch.get_rng_state().tolist(),l.model[1].n,l.model[1].last)))
    with pytest.raises(exc): learn.fit(1, cbs=[cb,Event('before_backward', note)])
    note(learn)
    assert notes[0]==notes[1] and not cb.recomputing and not replaced(learn)

def test_a_copy_of_the_model_is_a_plain_model():
    "Such as one of averaged weights"
    copies = Seen('after_batch', lambda l: deepcopy(l.model))
    small().fit(1, cbs=[ActivationCheckpoint(),copies])
    x,seen = torch.randn(4, 5).double(),[]
    for m in copies.values:
        m[1].lin1.register_forward_hook(lambda *_: seen.append(1))
        m(x).sum().backward()
        assert not any('forward' in vars(o) and o.forward.__self__ is not o for o in m.modules())
    assert len(seen)==len(copies.values)==3
