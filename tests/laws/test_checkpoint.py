"With `ActivationCheckpoint`, memory holds fewer activations, and no bit of the run changes."
import numpy as np, pytest, random, torch
from copy import deepcopy
from functools import partial
from itertools import product
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from types import SimpleNamespace
from fastai.vision.all import L, Module, SaveModelCallback, TensorImage, hook_output, set_seed
from fastai.text.models.awdlstm import AWD_LSTM
from fastaccum import ActivationCheckpoint, GradientAccumulation, GradientCache
from fastaccum.testing import assert_same_run, deviation, toy
from common import CallAt, collect_warnings
from small_learners import (ActivationCount, CountedLayer, StatefulLinear, all_params, applications, cross_entropy,
    make_application, replaced_methods)

class Block(Module):
    "A block with BatchNorm, dropout, an activation in place, and a skip connection"
    def __init__(self, norm=None):
        self.lin1,self.lin2,self.norm = nn.Linear(8, 8),nn.Linear(8, 8),nn.BatchNorm1d(8) if norm is None else norm
        self.act,self.drop = nn.ReLU(inplace=True),nn.Dropout()
    def forward(self, x): return x+self.lin2(self.drop(self.act(self.norm(self.lin1(x)))))
    def call(self, x): return self(x)

def net(*blocks):
    return nn.Sequential(nn.Linear(5, 8), *(blocks or [Block() for _ in range(3)]), nn.BatchNorm1d(8), nn.Linear(8, 3))
def small(model=net, **kwargs):
    return toy(8, **dict(dict(n=24, model=lambda: model().double(), splitter=all_params), **kwargs))

def one_cycle(learn, cbs): learn.fit_one_cycle(1, 1e-2, cbs=cbs)
def run(make, cbs, fit=one_cycle):
    """Fit the Learner that `make()` returns

    Return the Learner, and its weights, gradients, records and random states.
    """
    learn = make()
    set_seed(1)
    fit(learn, cbs)
    rng = torch.get_rng_state(),np.random.get_state()[1].astype(int),random.getstate()
    recorded = [getattr(learn.recorder, o) for o in ('losses','values','lrs')]
    return learn,[learn.model.state_dict(),[p.grad for p in learn.model.parameters()],recorded,rng]

def check(make=small, cbs=list, fit=one_cycle, **kwargs):
    """Fail if checkpoints change the run

    Return the Learner without checkpoints, the one with checkpoints, the callback.
    """
    cb = ActivationCheckpoint(**kwargs)
    (a,want),(b,got) = run(make, cbs(), fit),run(make, [cb,*cbs()], fit)
    assert deviation(want, got)==0 and len(b.recorder.losses)>1
    assert replaced_methods(b)==replaced_methods(a) and all(o.calls for o in cb.segments)
    return a,b,cb

# The second forward pass computes the same activations

@pytest.mark.parametrize('nm', [o for o in applications if o!='wgan'])
def test_the_run_of_an_application_is_the_same(nm):
    kinds = dict(unet={'BasicBlock','UnetBlock','ResBlock'}, vision={'BasicBlock'}, text_classifier={'WeightDropout'},
        language_model={'WeightDropout'}, bert={'BertLayer'}, gpt2={'GPT2Block'}, t5={'T5Block'})
    def learner(): return make_application(nm, 0.1, loss_func=cross_entropy)
    a,b,cb = check(learner)
    assert {o.kind for o in cb.segments}>=kinds.get(nm, set()) and len(cb.segments)>1
    if nm=='language_model': assert str(a.model[0].hidden)==str(b.model[0].hidden) and check(learner, segments=AWD_LSTM)
    # hooks set `stored`
    if nm=='unet': assert all(x.stored.equal(y.stored) for x,y in zip(a.model.sfs, b.model.sfs))

class UsesRunningStatistics(nn.BatchNorm1d):
    "BatchNorm whose output in training depends on the running statistics, after their update"
    def forward(self, x): return super().forward(x)*self.running_var.clone()+self.running_mean

class Thrice(Module):
    "A module whose forward pass runs the block `m` three times"
    def __init__(self, m): self.m,self.other = m,Block()
    def forward(self, x): return self.m(self.other(self.m(x))+self.m(x*2))

# blocks whose forward pass changes a state
changing_blocks = dict(late=lambda: Block(UsesRunningStatistics(8)),
    cumulative=lambda: Block(nn.BatchNorm1d(8, momentum=None)),
    own=lambda: StatefulLinear(8), spectral=lambda: Block(parametrizations.spectral_norm(nn.Linear(8, 8))),
    old_spectral=lambda: Block(spectral_norm(nn.Linear(8, 8))))

@pytest.mark.parametrize('nm,thrice', list(product(changing_blocks, [False,True])))
def test_state_that_a_forward_pass_changes_is_changed_once(nm, thrice):
    block = changing_blocks[nm]
    def model(): return net(*([Thrice(block())] if thrice else [block(), block()]))
    a,b,cb = check(partial(small, model), segments=(Block,StatefulLinear))
    kept = [[o.state() for o in l.model.modules() if isinstance(o, StatefulLinear)] for l in (a,b)]
    assert deviation(*kept)==0

class TakesStructures(Block):
    "A block that takes a `TensorImage`, a dict in a list, and a list to which the block appends"
    def call(self, x):
        x = x.as_subclass(TensorImage)
        x.img_size = 7
        bias = x.new_ones(8).as_subclass(torch.Tensor)
        return self(x, more=[dict(bias=bias)], outs=[x.mean().detach()])[0].as_subclass(torch.Tensor)
    def forward(self, x, *, more, outs):
        assert type(x) is TensorImage and x.img_size==7
        outs.append(x.detach().mean())
        return super().forward(x*len(outs)+more[0]['bias']+sum(outs)),len(more)

class ComparesInputs(Block):
    "A block that tests whether its inputs are the same tensor, as `nn.MultiheadAttention` does"
    def call(self, x): return self(x, x, x)
    def forward(self, x, *more): return super().forward(x*3 if more[0] is more[1] is x else x)

class FillsCache(Block):
    "A block that adds keys to a cache, which it takes as an argument, as models of transformers do"
    def call(self, x):
        x.tag = 1
        return self(x, SimpleNamespace(layers=[SimpleNamespace(keys=x[:1])]))
    def forward(self, x, cache):
        assert x.tag==1   # the input still has the attribute that `call` has set
        layer = cache.layers[0]
        layer.keys = torch.cat([layer.keys,x])
        return super().forward(x+layer.keys.mean(0))

class CallsBlocks(Module):
    "A model that calls each block through its method `call`"
    def __init__(self, block=Block, n=3):
        self.embed,self.head = nn.Linear(5, 8),nn.Linear(8, 3)
        self.blocks = nn.ModuleList(block() for _ in range(n))
    def forward(self, x):
        x = self.embed(x)
        for m in self.blocks: x = m.call(x)
        return self.head(x)

@pytest.mark.parametrize('block', [TakesStructures,ComparesInputs,FillsCache])
def test_segments_take_inputs_of_all_kinds(block): check(partial(small, lambda: CallsBlocks(block)), segments=block)

# Together with other callbacks; test_cache.py has more cases

def eval_mode_in_backward():
    "Return callbacks that switch the model to evaluation mode between forward and backward pass"
    return [CallAt('after_pred', lambda l: l.model.eval()),CallAt('after_batch', lambda l: l.model.train())]

settings = dict(modes=dict(cbs=eval_mode_in_backward),
    saved=dict(cbs=lambda: [SaveModelCallback()], fit=lambda l,cbs: l.fit(3, 1e-2, cbs=cbs)),
    twice=dict(cbs=lambda: [CallAt('before_backward', lambda l: l.loss_grad.backward(retain_graph=True))]))

@pytest.mark.parametrize('nm', settings)
def test_the_run_is_the_same_with_other_callbacks(nm): check(**settings[nm])

def in_backward():
    "Return whether a backward pass is running"
    return torch._C._current_graph_task_id()!=-1

def test_a_hook_on_a_segment_runs_once_and_a_hook_inside_of_a_segment_twice():
    """The second run of a hook inside of a segment is in the backward pass

    A hook may also alter the output.
    """
    recorded = []
    def learner():
        learn,outputs = small(),[]
        recorded.append(outputs)
        def record(m, i, o): outputs.append((len(type(m).__name__),o[0].sum()))
        learn.model[1].act.register_forward_hook(lambda m,i,o: o*2)
        learn.model[2].register_forward_hook(record)
        learn.model[2].norm.register_forward_hook(lambda *args: None if in_backward() else record(*args))
        for m in (learn.model[1],learn.model[2].drop): m.register_full_backward_hook(record)
        learn.model[2].lin2.weight.register_hook(lambda g: outputs.append(g.norm()))
        learn.hook = hook_output(learn.model[3], detach=False)
        return learn
    a,b,_ = check(learner)
    assert deviation(*recorded)==0 and len(recorded[0])>=3*5 and a.hook.stored.equal(b.hook.stored)

def test_validation_runs_without_checkpoints():
    calls,cb,learn = [],ActivationCheckpoint(),small()
    learn.model[1].lin1.register_forward_hook(lambda *_: calls.append((learn.training,in_backward())))
    learn.fit(1, cbs=cb)
    assert calls==[(True,False),(True,True)]*3+[(False,False)] and [o.calls for o in cb.segments]==[3]*4

# Activations in memory

def learner_of_counted_layers(**kwargs):
    "Return a Learner on batches of 16 samples, whose model has 6 layers that count their activations"
    def model(): return nn.Sequential(nn.Linear(5, 8), *(CountedLayer(8) for _ in range(6)), nn.Linear(8, 3)).double()
    return toy(16, n=128, model=model, splitter=all_params, **kwargs)

def with_memory_for(cap=10**9, cbs=None, f=lambda learn: learn.fit(1, 1e-2)):
    """Call `f(learn)` with a Learner of counted layers, and memory for the activations of `cap` samples

    Samples count once for each layer that keeps their activations. Return the result, and the peak of
    this count.
    """
    ActivationCount.reset(cap)
    try: return f(learner_of_counted_layers(cbs=cbs)),ActivationCount.peak
    finally: ActivationCount.reset()

def test_memory_holds_the_activations_of_one_segment_or_one_micro_batch():
    "Without checkpoints, memory holds the activations of all six layers for 16 samples"
    callbacks = None,ActivationCheckpoint(),GradientCache(micro_batch_size=4)
    plain,parts,cached = (with_memory_for(cbs=o)[1] for o in callbacks)
    # all activations were freed
    assert plain>=6*16 and parts<=2*16 and cached<=7*4 and ActivationCount.now==0

def test_larger_batches_fit_into_memory():
    def find_bs(learn): return int(learn.bs_find(show_plot=False, init_val=4))
    cache = GradientCache(micro_batch_size=4)
    assert [with_memory_for(60, cbs, find_bs)[0] for cbs in (None,ActivationCheckpoint(),cache)]==[8,32,128]

@pytest.mark.parametrize('cap', [70,20])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_memory_may_run_out_in_the_second_forward_pass(cap):
    "The batch is split, and the step is that of the whole batch"
    def fit(learn): return learn.fit(1, 1e-2) or learn
    acc = GradientAccumulation(16, micro_batch_size='auto')
    assert_same_run(with_memory_for(f=fit)[0], with_memory_for(cap, [ActivationCheckpoint(),acc], fit)[0])

# Choosing segments

def test_segments_are_found_or_given():
    "The table shows the name of each segment, how often it has run, and how much memory it keeps"
    model = net().double()
    def is_one(m): return isinstance(m, Block) and m is not model[2]
    for given,names in [(Block,'123'),((Block,nn.BatchNorm1d),'1234'),([model[1],model[3]],'13'),
        (nn.ModuleList(model[1:3]),'12'),(L(model[3]),'3'),(is_one,'13')]:
        cb = ActivationCheckpoint(given)
        small(lambda: model).fit(1, cbs=cb)
        assert [o.name for o in cb.segments]==[*names] and [o.kept for o in cb.segments]==[8*8*8]*len(names)
        assert all(o in repr(cb.segments) for o in ('segment','kept MiB',*names))
    learn = make_application('vision', loss_func=cross_entropy, cbs=ActivationCheckpoint())
    found = learn.activation_checkpoint.segments
    # no fit has run yet
    assert [o.kind for o in found].count('BasicBlock')==4 and not any(o.calls for o in found)

class Wrap(nn.ModuleDict):
    "A model that only calls its module `m`"
    def forward(self, x): return self['m'](x)
def single(): return CallsBlocks(n=1)   # a model without repeated blocks
def flat(): return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 3))
act = nn.Tanh()   # occurs twice in a model: in a segment, and before or after it
def act_after(): return nn.Sequential(nn.Linear(5, 8), act, Block(), act, Block(), nn.Linear(8, 3))
def act_before(): return nn.Sequential(act, nn.Linear(5, 8), Block(), act, nn.Linear(8, 8), Block(), nn.Linear(8, 3))
@pytest.mark.parametrize('model', [flat,single,lambda: Wrap(dict(m=flat())),lambda: Wrap(dict(m=single())),
    act_after,act_before])
def test_small_models_have_segments(model): check(partial(small, model))

def compiled(m): return torch.compile(m, backend='eager')

@pytest.mark.parametrize('wrap,segments,match', [(net,[lambda m: False],'Block'),
    (net,[[nn.Linear(1, 1)]],'Linear'), (net,[lambda l: [l[1],l[1].norm]],"'1.norm' lies inside segment '1'"),
    (lambda: nn.Linear(5, 3),[None],'no segments'),
    (lambda: nn.DataParallel(net()),[None],'DataParallel'), (lambda: compiled(net()),[None],'compiled')])
def test_a_model_that_cannot_be_cut_is_refused_before_it_trains(wrap, segments, match):
    learn = small(wrap)
    before,own = deepcopy(learn.model.state_dict()),replaced_methods(learn)
    if 'norm' in match: segments = [segments[0](learn.model)]
    with pytest.raises(ValueError, match=match): learn.fit(1, cbs=[ActivationCheckpoint(o) for o in segments])
    assert deviation(before, learn.model.state_dict())==0 and replaced_methods(learn)==own

class HasIdleBlock(Block):
    "A block with two inner blocks, of which one never runs"
    def __init__(self):
        super().__init__()
        self.embed,self.used,self.idle = nn.Linear(5, 8),Block(),Block()
    def forward(self, x): return super().forward(self.used(self.embed(x)))

def test_a_given_segment_that_does_not_run_is_warned_of():
    with pytest.warns(UserWarning, match="did not run.*1 of 2.*'idle'"):
        small(HasIdleBlock).fit(1, cbs=ActivationCheckpoint(Block))
    with collect_warnings('error'):
        # no warning if the segments were not given
        small(HasIdleBlock).fit(1, cbs=ActivationCheckpoint())

class Shift(Module):
    "A module that may multiply its input in place, because its backward pass does not need the input"
    def __init__(self, mul=1):
        self.bias,self.lin,self.mul,self.total = nn.Parameter(torch.ones(8)),nn.Linear(8, 8),mul,torch.zeros(8).double()
    def forward(self, x): return self.lin((x if self.mul==1 else x.mul_(self.mul))+self.bias)

class SumsInputs(Shift):
    "Adds its inputs in place to an attribute that is no buffer"
    def forward(self, x): return super().forward(x*self.total.add_(x.detach().sum(0)))

class ChangesInputLater(nn.Sequential):
    "Changes the input of its block after the block has run, which is allowed without checkpoints"
    def forward(self, x):
        x = self[0](x)
        return self[1](x)+x.mul_(2)

@pytest.mark.parametrize('block,match', [
    (lambda: ChangesInputLater(nn.Linear(8, 8), Shift()),r"input.* of segment '1\.1' was changed"),
    (lambda: Shift(2),"input.* of segment '1' was changed.*inplace=False"), (SumsInputs,r"register_buffer\('total'")])
def test_an_input_or_attribute_that_is_changed_in_place_is_refused(block, match):
    def model(): return net(block(), Block())
    learn = small(model)
    with pytest.raises(RuntimeError, match=match):
        learn.fit(1, cbs=ActivationCheckpoint(lambda m: isinstance(m, Shift)))
    assert not replaced_methods(learn)
    small(model).fit(1)   # without checkpoints, the fit runs

# Nothing is left behind by checkpoints; test_cache.py has more cases

def test_an_interrupt_in_the_second_forward_pass_leaves_nothing():
    "Buffers, attributes of modules, and random states are as before the backward pass"
    cb,notes = ActivationCheckpoint((Block,StatefulLinear)),[]
    learn = small(lambda: net(StatefulLinear(8), Block(), Block()))
    def fail(*_):
        if in_backward(): raise KeyboardInterrupt
    for m in learn.model[1:4].modules(): m.register_forward_hook(fail)
    def note(l):
        notes.append(deepcopy([l.model.state_dict(),random.getstate(),torch.get_rng_state(),l.model[1].n_calls]))
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=[cb,CallAt('before_backward', note)])
    note(learn)
    assert deviation(*notes)==0 and not replaced_methods(learn)
