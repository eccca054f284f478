"With a budget of tokens, micro-batches have texts of similar length; the run is the full-batch run."
import pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from fastai.vision.all import AvgMetric, DataLoader, DataLoaders, L, Learner, SGD, accuracy, noop
from fastaccum import AccumulationWarning, GradientAccumulation, GradientCache, TokenBudget
from fastaccum.testing import assert_same_run, deviation
from common import CallAt, weights
from on_processes import as_single_process, on_processes, this_process
from small_learners import silence_in_double

tf = pytest.importorskip('transformers')
small = dict(hidden_dropout_prob=0., attention_probs_dropout_prob=0., hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, intermediate_size=32)
no_dropout = dict(n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    embd_pdrop=0., attn_pdrop=0., resid_pdrop=0.)

class CountsColumns(nn.Module):
    "A model that notes the shapes of its inputs in training: a row is a text, with tokens and padding"
    def __init__(self):
        super().__init__()
        self.passes = []
    def count(self, ids):
        if self.training and torch.is_grad_enabled(): self.passes.append(ids.shape)
    @property
    def columns(self):
        "The number of tokens and padding in all forward passes"
        return sum(o.numel() for o in self.passes)

class Bert(CountsColumns):
    "Classifies texts by the mean of their tokens' states"
    def __init__(self):
        super().__init__()
        self.model = tf.BertModel(tf.BertConfig(vocab_size=50, **small), add_pooling_layer=False)
        self.out = nn.Linear(16, 3)
    def forward(self, b):
        self.count(b['input_ids'])
        mask = b['attention_mask']
        positions = (mask.cumsum(1)-1).clamp(0)   # positions count tokens, not padding
        states = self.model(**b, position_ids=positions).last_hidden_state
        return self.out((states*mask[...,None]).sum(1)/mask.sum(1, keepdim=True))

class Embedder(Bert):
    "Returns the mean of the tokens' states"
    def __init__(self):
        super().__init__()
        self.out = nn.Identity()

class GPT2(CountsColumns):
    "A language model: the targets are labels of tokens"
    def __init__(self):
        super().__init__()
        self.model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=50, **no_dropout))
    def forward(self, b):
        self.count(b['input_ids'])
        positions = (b['attention_mask'].cumsum(1)-1).clamp(0)
        return self.model(**b, position_ids=positions).logits

class ShiftedGPT2(GPT2):
    "A language model whose targets are the next tokens, a column less than the inputs have"
    def forward(self, b): return super().forward(b)[:,:-1]

class T5(CountsColumns):
    "An encoder-decoder model; its targets are other texts, but have as many columns as the inputs"
    def __init__(self):
        super().__init__()
        cfg = tf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.,
            decoder_start_token_id=0)
        self.model = tf.T5ForConditionalGeneration(cfg)
    def forward(self, b):
        self.count(b['input_ids'])
        return self.model(**b).logits

class MaskedLSTM(CountsColumns):
    "Predicts a class for each token, and does not read padding"
    def __init__(self):
        super().__init__()
        self.emb,self.lstm,self.out = nn.Embedding(50, 8),nn.LSTM(8, 8, batch_first=True),nn.Linear(8, 3)
    def forward(self, ids, mask):
        self.count(ids)
        packed = pack_padded_sequence(self.emb(ids), mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.shape[1])[0])

class CountsPadding(Bert):
    "Classifies texts by the mean over all columns, padding included, so padding changes the prediction"
    def forward(self, b): return super().forward(b|dict(attention_mask=torch.ones_like(b['attention_mask'])))
class NormalizesOverTime(Bert):
    "Has a BatchNorm layer whose statistics include padding"
    def __init__(self):
        super().__init__()
        self.bn,self.emb = nn.BatchNorm1d(3),nn.Embedding(50, 3)
    def forward(self, b):
        states = self.bn(self.emb(b['input_ids']).transpose(1, 2)).transpose(1, 2)*b['attention_mask'][...,None]
        return super().forward(b)+states.sum(1)

def padded(texts, side, value=0):
    "Put texts of different lengths into one tensor, with padding on the left or on the right"
    if side=='right': return pad_sequence(texts, batch_first=True, padding_value=value)
    return pad_sequence([o.flip(0) for o in texts], batch_first=True, padding_value=value).flip(1)

def random_texts(n):
    "Return `n` texts of random length, and a class, labels of tokens and a translation for each"
    lengths = torch.randn(n).mul(.8).exp().mul(8).int().clamp(1, 40).tolist()
    def words(k): return torch.randint(1, 50, (k,))
    return [dict(text=words(k), label=torch.randint(0, 3, ()), labels=words(k), translation=words(j))
        for k,j in zip(lengths, lengths[::-1])]

def collate(kind, side, items):
    "Return a batch of `items` with the inputs and targets that a model of the class `kind` takes"
    texts = [o['text'] for o in items]
    ids,mask = padded(texts, side),padded([torch.ones_like(o) for o in texts], side)
    if kind is MaskedLSTM: return ids,mask,padded([o['labels']%3 for o in items], side, -100)
    b = dict(input_ids=ids, attention_mask=mask)
    if kind is GPT2: return b,padded([o['labels'] for o in items], side, -100)
    if issubclass(kind, GPT2): return b,torch.where(mask[:,1:]*mask[:,:-1]>0, ids[:,1:], -100)
    if kind is not T5: return b,torch.stack([o['label'] for o in items])
    # a decoder needs padding on the right; labels get as many columns as inputs, as with
    # `padding='max_length'`
    labels = padded([o['translation'] for o in items], 'right', -100)
    labels = F.pad(labels, (0, ids.shape[1]-labels.shape[1]), value=-100)
    return b|dict(decoder_input_ids=labels.clamp(0)),labels

class FlatCrossEntropy(nn.CrossEntropyLoss):
    "Cross-entropy of classes or of tokens, without those that are labeled -100"
    def forward(self, out, y): return super().forward(out.flatten(0, -2), y.flatten())

def text_learner(kind, side='right', bs=24, n=48, seed=0, cbs=None):
    "Return a Learner that reads batches of random texts"
    torch.manual_seed(seed)
    data = random_texts(n)
    dls = DataLoaders(*[DataLoader(data, bs=bs, create_batch=partial(collate, kind, side)) for _ in range(2)])
    return silence_in_double(Learner(dls, kind(), FlatCrossEntropy(), opt_func=partial(SGD, mom=.9), cbs=cbs))

def fit(learn, cbs=()):
    "Train for two epochs, and return the Learner"
    learn.fit_one_cycle(2, .05, cbs=cbs)
    return learn

def budget_of(kind, n, **kwargs):
    "Return a TokenBudget; with `pad_id` for a model whose batches have no `attention_mask` in a mapping"
    return TokenBudget(n, pad_id=0 if kind is MaskedLSTM else None, **kwargs)

# models, and the side of padding; `pack_padded_sequence`, which MaskedLSTM uses, supports padding on the
# right only
kinds = [(Bert,'right'),(Bert,'left'),(GPT2,'right'),(GPT2,'left'),(ShiftedGPT2,'right'),
    (ShiftedGPT2,'left'),(T5,'right'),(T5,'left'),(MaskedLSTM,'right')]

@pytest.mark.parametrize('kind,side', kinds)
def test_the_run_is_the_full_batch_run_with_fewer_columns(kind, side, recwarn):
    seed = int(torch.randint(0, 1000, ()))
    full = fit(text_learner(kind, side, seed=seed))
    split = fit(text_learner(kind, side, seed=seed), GradientAccumulation(24, micro_batch_size=budget_of(kind, 80)))
    # T5 normalizes in single precision
    assert deviation(weights(full), weights(split))<(1e-8 if kind is T5 else 1e-10)
    assert_same_run(full, split)
    assert split.model.columns<.6*full.model.columns
    assert all(rows==1 or rows*columns<=80 for rows,columns in split.model.passes)
    assert not [o for o in recwarn if issubclass(o.category, AccumulationWarning)]

@pytest.mark.parametrize('acc', [dict(accum_bs=48), dict(accum_bs=24, log_accum_batch=False)], ids=str)
def test_the_weights_are_the_same_in_steps_of_two_batches_and_if_micro_batches_are_recorded(acc):
    a,b = (fit(text_learner(Bert), GradientAccumulation(**acc, micro_batch_size=o)) for o in (None,TokenBudget(80)))
    assert deviation(weights(a), weights(b))<1e-10
    n_rows = len(b.recorder.losses)
    assert n_rows==len(a.recorder.losses) if acc.get('log_accum_batch', True) else n_rows>len(a.recorder.losses)

def test_training_metrics_are_computed_over_all_texts():
    def learner():
        learn = text_learner(Bert)
        learn.metrics = L(AvgMetric(accuracy))
        learn.recorder.train_metrics = True
        return learn
    assert_same_run(fit(learner()), fit(learner(), GradientAccumulation(24, micro_batch_size=TokenBudget(80))))

@pytest.mark.parametrize('side', ['left','right'])
def test_lengths_may_come_from_a_function_or_from_the_id_of_padding(side):
    class Ids(Bert):
        def forward(self, ids): return super().forward(dict(input_ids=ids, attention_mask=(ids!=0).long()))
    def learner():
        learn = text_learner(Ids, side)
        learn.add_cb(CallAt('before_batch', lambda l: setattr(l, 'xb', (l.x['input_ids'],)), order=-1, run_valid=True))
        return learn
    full = fit(learner())
    def count(b): return (b[0]!=0).sum(1)
    for size in (TokenBudget(80, pad_id=0),TokenBudget(80, length=count, padding_side=side),
            TokenBudget(80, length=lambda b: count(b).tolist(), padding_side=side)):
        split = fit(learner(), GradientAccumulation(24, micro_batch_size=size))
        assert deviation(weights(full), weights(split))<1e-10
        assert split.model.columns<.6*full.model.columns

def test_lengths_may_be_an_input_that_comes_before_the_tokens():
    class TakesLengths(Bert):
        def forward(self, lengths, ids):
            mask = torch.arange(ids.shape[1])<lengths[:,None]
            return super().forward(dict(input_ids=ids, attention_mask=mask.long()))
    def take_lengths(learn): learn.xb = (learn.x['attention_mask'].sum(1),learn.x['input_ids'])
    def learner():
        learn = text_learner(TakesLengths)
        return learn.add_cb(CallAt('before_batch', take_lengths, order=-1, run_valid=True))
    budget = TokenBudget(80, length=lambda b: b[0])
    full,split = fit(learner()),fit(learner(), GradientAccumulation(24, micro_batch_size=budget))
    assert deviation(weights(full), weights(split))<1e-10
    assert split.model.columns<.6*full.model.columns

def in_batch_loss(z, y):
    "Compares all texts of a batch with each other"
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z@z.T/.1, torch.arange(len(z)).flip(0))

def test_gradient_cache_takes_a_budget():
    def learner():
        learn = text_learner(Embedder)
        learn.loss_func = in_batch_loss
        return learn
    full,split = fit(learner()),fit(learner(), GradientCache(micro_batch_size=TokenBudget(80)))
    assert_same_run(full, split)
    assert split.model.columns<1.2*full.model.columns   # two forward passes over half as many columns
    with pytest.raises(Exception, match='GradientCache. cannot join'):
        fit(text_learner(GPT2), GradientCache(micro_batch_size=TokenBudget(80)))

def test_gradient_cache_never_exceeds_the_budget():
    class Limited(Embedder):
        def count(self, ids):
            assert len(ids)==1 or ids.numel()<=40, ids.shape
            super().count(ids)
    learn = text_learner(Limited)
    learn.loss_func = in_batch_loss
    fit(learn, GradientCache(micro_batch_size=TokenBudget(40)))

def test_accum_check_compares_the_budget_with_the_whole_batch():
    def check(kind):
        acc = GradientAccumulation(24, micro_batch_size=TokenBudget(80))
        return text_learner(kind).accum_check(cbs=acc)
    assert check(Bert).ok and check(CountsPadding).off['gradients']>1e-3

@pytest.mark.parametrize('kind', [CountsPadding,NormalizesOverTime])
def test_a_model_in_which_padding_counts_is_warned_of_once(kind):
    learn = text_learner(kind)
    with pytest.warns(AccumulationWarning, match='when padding is trimmed') as said:
        fit(learn, GradientAccumulation(24, micro_batch_size=TokenBudget(80)))
    assert sum('when padding is trimmed' in str(o.message) for o in said)==1

def test_trying_the_model_does_not_change_the_run():
    "Running the model without padding, to see whether padding counts, must not change the run"
    class WithDropout(NormalizesOverTime):
        def forward(self, b): return F.dropout(super().forward(b), .5, self.training)
    runs = []
    for tries in (True,False):
        learn,size = text_learner(WithDropout),TokenBudget(80)
        if not tries: size._try_trimming = noop
        runs.append(fit(learn, GradientAccumulation(24, micro_batch_size=size)))
    a,b = ([*o.model.state_dict().values()] for o in runs)
    assert all(map(torch.equal, a, b))

def test_a_row_that_is_longer_than_the_budget_is_warned_of_once():
    full = fit(text_learner(Bert))
    with pytest.warns(UserWarning, match=r'is longer than TokenBudget\(5\)') as said:
        split = fit(text_learner(Bert), GradientAccumulation(24, micro_batch_size=TokenBudget(5)))
    assert sum('is longer than' in str(o.message) for o in said)==1
    assert deviation(weights(full), weights(split))<1e-10

refused = dict(no_tokens=(lambda: TokenBudget(0), ValueError, '`max_tokens` must be at least 1, got 0'),
    no_number=(lambda: TokenBudget('8k'), TypeError, "`max_tokens` must be.*got '8k'"),
    pad_token=(lambda: TokenBudget(80, pad_id='[PAD]'), TypeError, 'tokenizer.pad_token_id'),
    no_function=(lambda: TokenBudget(80, length=8), TypeError, '`length` must be a function.*got 8'),
    no_side=(lambda: TokenBudget(80, length=len, padding_side='end'), ValueError, "'right' or 'left', got 'end'"))

@pytest.mark.parametrize('case', refused)
def test_bad_arguments_are_refused(case):
    make,error,match = refused[case]
    with pytest.raises(error, match=match): make()

# budgets that find no length, too few lengths, lengths beyond the columns, no numbers, or negative
# numbers
lengths = dict(nothing=TokenBudget(80), one_short=TokenBudget(80, length=lambda b: (b[0]!=0).sum(1)[1:]),
    too_long=TokenBudget(80, length=lambda b: (b[0]!=0).sum(1)+100), no_numbers=TokenBudget(80, length=lambda b: 'abc'),
    negative=TokenBudget(80, length=lambda b: -(b[0]!=0).sum(1)))

@pytest.mark.parametrize('case', lengths)
@pytest.mark.parametrize('cls', [GradientAccumulation,GradientCache])
def test_lengths_that_are_not_found_are_refused_before_a_weight_changes(case, cls):
    learn = text_learner(MaskedLSTM)
    before = weights(learn)
    with pytest.raises(ValueError, match='pad_id=|return the number of tokens in each row'):
        fit(learn, cls(micro_batch_size=lengths[case]))
    assert torch.equal(before, weights(learn))

def test_the_plan_and_the_repr_of_the_callback_name_the_budget(capsys):
    learn = text_learner(Bert)
    acc = GradientAccumulation(24, micro_batch_size=TokenBudget(80))
    words = '24 samples per step (1 batch of 24, in micro-batches of at most 80 tokens), 2 steps per epoch'
    assert acc.plan(learn).summary==words
    assert repr(acc)=='GradientAccumulation: 24 samples per step, in micro-batches of at most 80 tokens'

@on_processes(2)
def test_each_of_two_processes_sorts_its_own_texts():
    """The run is that of one process

    `log_accum_batch=False`, which needs equal numbers of micro-batches, is refused.
    """
    batch = partial(collate, Bert, 'right')
    def learner(data, bs):
        learn = text_learner(Bert)
        learn.dls = DataLoaders(*[DataLoader(data, bs=bs, create_batch=batch) for _ in range(2)])
        return learn
    torch.manual_seed(0)
    texts = random_texts(48)
    with as_single_process(): full = fit(learner(texts, 24))
    split = learner([o for i in (0,24) for o in texts[i:i+24][this_process.rank::2]], 12)
    split.model = DistributedDataParallel(split.model)
    fit(split, GradientAccumulation(24, micro_batch_size=TokenBudget(60)))
    assert deviation(weights(full), weights(split))<1e-10
    with pytest.raises(ValueError, match=r'`micro_batch_size=TokenBudget\(60\)` does not work on several'):
        fit(split, GradientAccumulation(24, micro_batch_size=TokenBudget(60), log_accum_batch=False))
