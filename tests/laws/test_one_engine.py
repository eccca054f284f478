"""A micro-batch is tried in parts: the fit warns of what differs, and names what was tried and makes it right.

Each kind is a set-up from public code: the loss has a term that the model computes from its batch, the model
returns its losses, labels are shifted, class weights are replaced during the fit, the workers of a loader make
batches of their own, parameters of the loss have an optimizer of their own, and forward passes change buffers.
"""
import gc, pytest, torch
from collections import Counter, OrderedDict
from enum import Enum
from types import SimpleNamespace
from weakref import ref
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, get_worker_info
from fastai.basics import Callback, CancelBatchException, DataLoaders, Learner, Module, SGD, set_seed
from fastai.data.load import DataLoader
from fastaccum import AccumulationWarning, GradientAccumulation
from fastaccum.testing import Float32Loss
from common import CallAt, LimitedMemory, RaiseAt, collect_warnings, runs_out_on_attempts, weights

gen = torch.Generator().manual_seed(0)
xs = torch.randn(320, 8, generator=gen).double()
ys = xs[:,:3].argmax(1)
items = list(zip(xs, ys))

def loaders(bs, items=items): return DataLoaders(*(DataLoader(o, bs=bs) for o in (items,items[:64])))
def linear(n=3): return nn.Linear(8, n).double()
def learner(dls, model, loss_func, cbs=(), **kwargs):
    return Learner(dls, model.double(), loss_func, opt_func=SGD, cbs=[Float32Loss(),*cbs], **kwargs)

def fit(make, bs, cbs=(), n_epoch=2, lr=.1):
    "Return the Learner after a fit, and the warnings of fastaccum as pairs (entry, text)"
    set_seed(0)
    learn = make(bs)
    with collect_warnings() as seen, learn.no_bar(), learn.no_logging(): learn.fit(n_epoch, lr, cbs=cbs)
    ours = [str(o.message).split('\nMore: ') for o in seen if issubclass(o.category, (AccumulationWarning,UserWarning))]
    return learn,[(link.partition('#')[2],text) for text,*link in ours for link in link]

def all_weights(learn):
    loss = [p.detach().flatten() for p in getattr(learn.loss_func, 'parameters', list)()]
    return torch.cat([weights(learn),*loss])

def both(make, micro=16, **kwargs):
    "Return by how much the weights of the full-batch run and of a run on micro-batches differ, and its warnings"
    a,_ = fit(make, 64)
    b,told = fit(make, micro, GradientAccumulation(64, **kwargs))
    return (all_weights(a)-all_weights(b)).abs().max().item(),told

def suggested(text):
    "Return the function that a warning suggests as `n_items=`"
    code = text.partition('`n_items=')[2].partition('`')[0]
    assert code.startswith('lambda'), text
    return eval(code)

# The loss, wherever it is computed

class Experts(Module):
    "A mixture of experts, with a term that balances the experts over the samples of a batch"
    def __init__(self): self.gate,self.experts = nn.Linear(8, 3),nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        top = F.one_hot(p.argmax(-1), 3).to(p.dtype)
        self.balance = 3*(top.mean(0)*p.mean(0)).sum()
        return sum((top*p)[:,i:i+1]*expert(x) for i,expert in enumerate(self.experts))

def with_balance(bs):
    model = Experts()
    return learner(loaders(bs), model, lambda out,y: F.cross_entropy(out, y)+.5*model.balance)

def test_a_term_that_the_model_computes_from_its_batch_is_told():
    off,told = both(with_balance)
    assert off>1e-3 and [entry for entry,_ in told]==['loss-not-a-mean']
    assert 'no callback helps' in told[0][1]

def collate(b): return torch.stack([x for x,_ in b]),[dict(labels=y) for _,y in b],torch.zeros(len(b))

class Detector(Module):
    "A model that returns losses, which are means over the objects of the batch"
    def __init__(self): self.classify = nn.Linear(8, 3)
    def forward(self, x, targets):
        n = torch.tensor([len(o['labels']) for o in targets])
        labels = torch.cat([o['labels'] for o in targets])
        return dict(loss=F.cross_entropy(self.classify(x).repeat_interleave(n, 0), labels))

def detection(bs):
    objects = [(x,torch.randint(0, 3, (1+i%5,), generator=torch.Generator().manual_seed(i))) for i,x in enumerate(xs)]
    dls = DataLoaders(*(TorchDataLoader(o, bs, collate_fn=collate) for o in (objects,objects[:64])))
    return learner(dls, Detector(), lambda losses,_: sum(losses.values()))

class ShiftedLM(Module):
    "A language model that shifts its labels and returns its loss"
    def __init__(self): self.emb,self.out = nn.Embedding(12, 8),nn.Linear(8, 12)
    def forward(self, ids, labels):
        logits = self.out(self.emb(ids).cumsum(1)/torch.arange(1, 11)[:,None])
        loss = F.cross_entropy(logits[:,:-1].reshape(-1, 12), labels[:,1:].reshape(-1))
        return SimpleNamespace(logits=logits, loss=loss)

ids = torch.randint(0, 12, (320,10), generator=gen)
lengths = torch.randint(3, 11, (320,), generator=gen)
labels = torch.where(torch.arange(10)<lengths[:,None], ids, -100)
def shifted(bs):
    return learner(loaders(bs, list(zip(ids, labels, labels))), ShiftedLM(), lambda out,_: out.loss)

class MeanOfTokens(Module):
    "A mean over targets that are not -100, which has no attribute `ignore_index`"
    def forward(self, p, y): return F.cross_entropy(p.view(-1, 3), y.view(-1))
tokens = torch.where(torch.arange(5)<1+torch.arange(320)[:,None]%5, torch.randint(0, 3, (320,5), generator=gen), -100)
def of_tokens(bs): return learner(loaders(bs, list(zip(xs, tokens))), linear(15), MeanOfTokens())

@pytest.mark.parametrize('make', [detection,shifted,of_tokens])
def test_the_function_that_a_warning_suggests_makes_the_run_right(make):
    off,((entry,text),) = both(make)
    assert off>1e-4 and entry=='loss-not-a-mean'
    off,told = both(make, n_items=suggested(text))
    assert off<1e-9 and not told

def test_a_wrong_count_of_the_user_is_told_and_the_right_one_suggested():
    off,((_,text),) = both(shifted, n_items=lambda learn: (learn.y!=-100).sum())
    assert off>1e-5 and 'the items that `n_items` counts' in text
    assert both(shifted, n_items=suggested(text))==(pytest.approx(0, abs=1e-9),[])

def test_samples_that_count_equally_need_no_n_items():
    def make(bs): return learner(loaders(bs), linear(), nn.CrossEntropyLoss())
    off,((_,text),) = both(make, n_items=lambda learn: learn.y.sum())
    assert off>1e-4 and 'Leave out `n_items=`' in text

class Compares(Callback):
    "Adds a term that compares samples"
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+self.pred.mean(0).square().sum()

def test_a_callback_that_compares_samples_is_named():
    def make(bs): return learner(loaders(bs), linear(), nn.CrossEntropyLoss(), [Compares()])
    off,((entry,text),) = both(make)
    assert off>1e-4 and entry=='changed-loss' and 'changed by Compares' in text and '`fastaccum.GradientCache(' in text

def test_a_loss_that_cannot_be_tried_is_told_once():
    def draws(p, y): return F.cross_entropy(p+1e-3*torch.randn(p.shape), y)
    _,((entry,text),) = both(lambda bs: learner(loaders(bs), linear(), draws))
    assert entry=='loss-not-tried' and 'draws random numbers' in text and 'learn.accum_check(' in text

# What is right gives no warning

class Weighted(Callback):
    "A loss that divides by the weights of its samples"
    def before_batch(self): self.w = 1+2*(self.y==0).double()
    def after_loss(self):
        if not self.training: return
        self.learn.loss_grad = (F.cross_entropy(self.pred, self.y, reduction='none')*self.w).sum()/self.w.sum()

class Corrupts(Callback):
    def before_batch(self):
        self.learn.clean = self.x
        self.learn.xb = (self.x*(torch.arange(8)%3>0),)
def denoising(bs):
    learn = learner(loaders(bs), linear(8), lambda p,y: F.mse_loss(p, learn.clean), [Corrupts()])
    return learn

class Tempered(Module):
    "Cross-entropy with a trained temperature; targets of -100 are ignored"
    ignore_index = -100
    def __init__(self): self.t = nn.Parameter(torch.ones((), dtype=torch.float64))
    def forward(self, p, y): return F.cross_entropy((self.t*p).view(-1, 3), y.view(-1))
class StepsLoss(Callback):
    "Steps the parameters of the loss function"
    def before_fit(self): self.o = torch.optim.SGD(self.learn.loss_func.parameters(), lr=.5)
    def after_step(self):
        self.o.step()
        self.o.zero_grad()
def tempered(bs): return learner(loaders(bs, list(zip(xs, tokens))), linear(15), Tempered(), [StepsLoss()])

def in_little_memory(bs):
    "Memory runs out in the second backward pass of a run on micro-batches, after the loss has got its gradient"
    memory = LimitedMemory(runs_out_on_attempts({1}, 'backward') if bs<64 else None)
    model = nn.Sequential(nn.Linear(8, 8), memory, nn.Linear(8, 15))
    return learner(loaders(bs, list(zip(xs, tokens))), model, Tempered(), [StepsLoss()])

def test_a_failed_backward_pass_is_undone_for_the_parameters_of_the_loss_as_well():
    off,((entry,_),) = both(in_little_memory, 32, micro_batch_size='auto')
    assert off<1e-9 and entry=='memory-ran-out'

class StepsLossSometimes(StepsLoss):
    "Steps the parameters of the loss function in every third step only"
    def before_fit(self):
        super().before_fit()
        self.n_steps = 0
    def after_step(self):
        self.n_steps += 1
        if self.n_steps%3==0: super().after_step()

def test_gradients_that_an_optimizer_collects_over_several_steps_are_not_changed_by_later_steps():
    "Some targets are ignored, so each step has a correction. The second step is cancelled"
    def cancel(learn):
        if learn.train_iter==1: raise CancelBatchException
    def make(bs):
        cbs = [StepsLossSometimes(),CallAt('before_batch', cancel)]
        return learner(loaders(bs, list(zip(xs, tokens))), linear(15), Tempered(), cbs)
    off,told = both(make)
    assert off<1e-9 and not told

def test_an_interrupted_step_leaves_no_gradient_of_the_loss_behind():
    learn = tempered(16)
    stop = RaiseAt('after_backward', KeyboardInterrupt, 2)
    with learn.no_bar(), learn.no_logging(), pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=[GradientAccumulation(64),stop])
    assert learn.loss_func.t.grad is None

class Noisy(Module):
    "A model that draws random numbers in evaluation mode as well, as a variational autoencoder does"
    def __init__(self): self.lin = nn.Linear(8, 3)
    def forward(self, x): return self.lin(x)+0*torch.randn(len(x), 3).double()


@pytest.mark.parametrize('make,kwargs', [
    (lambda bs: learner(loaders(bs), linear(), nn.CrossEntropyLoss(), [Weighted()]),
        dict(n_items=lambda l: l.weighted.w.sum())),
    (denoising,{}), (tempered,{}), (lambda bs: learner(loaders(bs), Noisy(), nn.CrossEntropyLoss()),{})],
    ids=['weights_of_samples','clean_inputs','parameters_of_the_loss','noise'])
def test_a_run_that_is_the_full_batch_run_gives_no_warning(make, kwargs):
    off,told = both(make, **kwargs)
    assert off<1e-9 and not told

class Reparameterizes(Noisy):
    "Adds noise that matters"
    def forward(self, x): return self.lin(x)+torch.randn(len(x), 3).double()

def test_random_numbers_of_the_model_are_not_taken_for_a_wrong_loss():
    "Neither as with dropout, whose layers can be switched off, nor otherwise"
    for model in (lambda: nn.Sequential(nn.Dropout(), nn.Linear(8, 3)),Reparameterizes):
        _,told = both(lambda bs: learner(loaders(bs), model(), nn.CrossEntropyLoss()))
        assert not told

# Settings of the loss that change during a fit

class Reweights(Callback):
    "Replaces class weights in the middle of an epoch, as deferred re-weighting does"
    def before_step(self):
        if self.train_iter==2: self.learn.loss_func.weight = torch.tensor([.2,1.,5.]).double()
class Replaces(Callback):
    def before_epoch(self):
        if self.epoch==1: self.learn.loss_func = nn.CrossEntropyLoss(weight=torch.tensor([.2,1.,5.]).double())

@pytest.mark.parametrize('cb', [Reweights,Replaces])
def test_class_weights_that_change_during_a_fit_count_at_once(cb):
    def make(bs):
        return learner(loaders(bs), linear(), nn.CrossEntropyLoss(weight=torch.ones(3).double()), [cb()])
    assert both(make)==(pytest.approx(0, abs=1e-9),[])

class SumsLater(Callback):
    "Replaces the loss by one that is wrong, in the middle of an epoch"
    def before_step(self):
        if self.train_iter==2: self.learn.loss_func = lambda p,y: F.cross_entropy(p-p.mean(0), y)

def test_a_loss_function_that_replaces_another_is_tried_at_once():
    def make(bs): return learner(loaders(bs), linear(), nn.CrossEntropyLoss(), [SumsLater()])
    off,told = fit(make, 16, GradientAccumulation(64), n_epoch=1)
    assert [entry for entry,_ in told]==['loss-not-a-mean']

# Loaders whose workers make batches

class Stream(IterableDataset):
    "200 samples, which the workers of a loader share"
    def __len__(self): return 200
    def __iter__(self):
        worker = get_worker_info()
        i,n = (worker.id,worker.num_workers) if worker else (0,1)
        return iter(items[:200][i::n])
def streamed(bs):
    dls = DataLoaders(TorchDataLoader(Stream(), bs, num_workers=2), TorchDataLoader(items[:64], 64))
    return learner(dls, linear(), nn.CrossEntropyLoss())

def test_workers_that_make_batches_are_told_and_whole_steps_that_are_split_end_with_their_batch():
    off,((entry,text),) = both(streamed)
    assert off>1e-3 and entry=='loader-order' and 'in one of its 2 workers' in text
    assert '`bs=64`' in text and '`micro_batch_size=16`' in text
    assert both(streamed, micro=64, micro_batch_size=16)==(pytest.approx(0, abs=1e-9),[])
    check = streamed(16).accum_check(cbs=GradientAccumulation(64))
    assert not check.ok and check.off['loader']==1

# Buffers

class Normalizes(Module):
    "Keeps the largest input of all forward passes, which only validation uses"
    def __init__(self): self.register_buffer('largest', torch.zeros(8).double())
    def forward(self, x):
        if not self.training: return x/self.largest
        self.largest.lerp_(x.abs().amax(0), .1)
        return x

def test_a_buffer_that_only_validation_uses_is_told():
    def make(bs): return learner(loaders(bs), nn.Sequential(Normalizes(), nn.Linear(8, 3)), nn.CrossEntropyLoss())
    _,((entry,text),) = both(make)
    assert entry=='changed-buffer' and '`0.largest`' in text

class Codebook(Module):
    "A codebook that each forward pass moves, as in vector quantization"
    def __init__(self):
        codes = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
        self.register_buffer('codes', codes.double())
    def forward(self, z):
        i = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            hot = F.one_hot(i, len(self.codes)).to(z)
            self.codes.lerp_(hot.T@z.detach()/hot.sum(0).clamp(min=1)[:,None], .2)
        return z+(self.codes[i]-z).detach()

class NewCodebook(Codebook):
    "A codebook that each forward pass replaces by another tensor"
    def forward(self, z):
        self.codes = self.codes.clone()
        return super().forward(z)

@pytest.mark.parametrize('codebook', [Codebook,NewCodebook])
def test_a_buffer_that_forward_passes_change_is_told_with_its_name(codebook):
    def model(): return nn.Sequential(nn.Linear(8, 4), codebook(), nn.Linear(4, 3))
    def make(bs): return learner(loaders(bs), model(), nn.CrossEntropyLoss())
    off,((entry,text),) = both(make)
    assert off>1e-3 and entry=='changed-buffer' and '`1.codes`' in text and 'ActivationCheckpoint' in text

# The check says the same

@pytest.mark.parametrize('make', [with_balance,detection,shifted,of_tokens])
def test_the_check_finds_what_the_fit_finds_in_the_same_words(make):
    _,((_,text),) = both(make)
    remedy = text.partition('than the full-batch run. ')[2].partition(' with `GradientCache')[0]
    check = make(16).accum_check(cbs=GradientAccumulation(64))
    row, = [o for o in check.rows if o.what=='loss']
    assert not check.ok and not row.ok and row.remedy.startswith(remedy[:60])

# A trial leaves nothing behind

class Remembers(Callback):
    "Counts the micro-batches in a number, a Counter, an ordered dict, a list on the Learner, and a closure"
    def __init__(self):
        n_calls = 0
        def count():
            nonlocal n_calls
            n_calls += 1
            return n_calls
        self.n,self.classes,self.count = 0,Counter(),count
        self.sizes = OrderedDict()
    def before_fit(self): self.learn.seen = []
    def after_loss(self):
        if not self.training: return
        self.n += 1
        self.classes.update(self.y.tolist())
        self.sizes[self.n] = len(self.y)
        self.learn.seen.append(len(self.y))
        self.last_count = self.count()

def test_a_trial_leaves_no_trace_in_callbacks():
    cb = Remembers()
    learn,_ = fit(lambda bs: learner(loaders(bs), linear(), nn.CrossEntropyLoss(), [cb]), 16, GradientAccumulation(64))
    n = 2*320//16
    assert (cb.n,cb.last_count,sum(cb.classes.values()),learn.seen)==(n,n,2*320,[16]*n)
    assert [*cb.sizes.values()]==[16]*n

class Unlabeled(Callback):
    "Adds a term of the next batch of another loader"
    def before_fit(self): self.batches = iter(DataLoader(list(xs)*10, bs=16))
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+self.model(next(self.batches)).square().mean()

def test_an_iterator_is_not_advanced_by_trials_and_that_nothing_was_tried_is_told():
    "An iterator cannot be put back. The check leaves the callback out, and so finds it"
    def make(): return learner(loaders(16), linear(), nn.CrossEntropyLoss(), [Unlabeled()])
    def read(cbs):
        learn,told = fit(lambda bs: make(), 16, cbs)
        return len(list(learn.unlabeled.batches)),[entry for entry,_ in told]
    (plain,_),(ours,told) = read([]),read(GradientAccumulation(64))
    assert plain==ours and told==['loss-not-tried']
    row, = [o for o in make().accum_check(cbs=GradientAccumulation(64)).rows if o.what=='callbacks']
    assert not row.ok and row.where=='Unlabeled'

class Key(Enum): INPUT = 1
def test_inputs_whose_names_are_no_text_are_trained_on():
    "The source code of a function for `n_items=` can only contain texts"
    class Model(Module):
        def __init__(self): self.lin = nn.Linear(8, 3)
        def forward(self, b): return self.lin(b[Key.INPUT].double())
    whole = [({Key.INPUT:torch.randint(0, 5, (8,), generator=gen)},y) for y in ys]
    assert both(lambda bs: learner(loaders(bs, whole), Model(), nn.CrossEntropyLoss()))==(pytest.approx(0, abs=1e-9),[])

def refers_to_itself(bs):
    "Return a Learner whose loss function compares samples, and refers to the Learner"
    learn = learner(loaders(bs), linear(8), nn.MSELoss(), [Corrupts()])
    learn.loss_func = lambda p,y: F.mse_loss(p-p.mean(0), learn.clean)
    return learn

def test_a_learner_that_was_warned_of_is_freed():
    learn = refers_to_itself(16)
    with collect_warnings(), learn.no_bar(), learn.no_logging(): learn.fit(1, 1e-3, cbs=GradientAccumulation(64))
    alive = ref(learn)
    del learn
    gc.collect()
    assert alive() is None

class HasSlots:
    "A loss function to which no weak reference can be made"
    __slots__ = ()
    def __call__(self, p, y): return F.cross_entropy(p, y)

def test_a_loss_function_without_weak_references_is_trained_with():
    assert both(lambda bs: learner(loaders(bs), linear(), HasSlots()))==(pytest.approx(0, abs=1e-9),[])

def test_a_learner_without_a_loss_function_is_fitted_as_in_fastai():
    "Its batches have no targets, so fastai computes no loss, and nothing is trained: the fit says so"
    inputs = [(x,) for x in xs]
    dls = DataLoaders(*(DataLoader(inputs, bs=16, n_inp=1) for _ in range(2)))
    learn = Learner(dls, linear(), nn.MSELoss())
    learn.loss_func,before = None,nn.utils.parameters_to_vector(learn.model.parameters())
    with learn.no_bar(), learn.no_logging(), pytest.warns(UserWarning, match=r'no targets.*`\(inputs,labels\)`'):
        learn.fit(1, 1e-3, cbs=GradientAccumulation(64))
    assert nn.utils.parameters_to_vector(learn.model.parameters()).equal(before)

def test_the_check_of_a_sum_says_what_its_terms_have_to_be():
    class Pairs(Module):
        reduction = 'sum'
        def forward(self, p, y): return F.cross_entropy(p, y, reduction='sum')+p.mean(0).square().sum()
    def make(bs): return learner(loaders(bs), linear(), Pairs())
    _,((_,text),) = fit(make, 16, GradientAccumulation(64), lr=1e-3)
    row, = [o for o in make(16).accum_check(cbs=GradientAccumulation(64)).rows if o.what=='loss']
    for o in (text,row.remedy): assert 'each of its terms must be a sum over samples' in o

class MixesOnce(Callback):
    "A hook mixes what comes out of a layer, in the first forward pass of each batch"
    def before_batch(self): self.is_mixed = False
    def before_fit(self): self.handle = self.model[0].register_forward_hook(self.mix)
    def after_fit(self): self.handle.remove()
    def mix(self, module, inputs, out):
        if self.is_mixed or not self.training: return
        self.is_mixed = True
        return out+out.square()

def test_predictions_that_differ_when_the_model_runs_again_are_not_said_to_be_a_state_of_the_model():
    def make(bs):
        model = nn.Sequential(linear(), nn.Linear(3, 3))
        return learner(loaders(bs), model, nn.CrossEntropyLoss(), [MixesOnce()])
    off,((entry,text),) = both(make)
    assert off<1e-9 and entry=='loss-not-tried' and 'something else when it runs again' in text
