"""Small Learners as users of fastai build them, in double precision, and parts of Learners.

- Data and loaders: `random_floats`, `random_ints`, `tensor_loaders`, `with_loaders`, `MappingBatch`
- Learners of nine applications: `make_application(name, drop)`, with the names in `applications`
- Losses, and MixUp in double precision: `logits_of`, `cross_entropy`, `MixUpLoss`, `DoubleMixUp`
- Any Learner: `silence_in_double`, `all_params`, `replaced_methods`
- Layers: `StatefulLinear`, whose output depends on earlier forward passes
- Layers with activations to count: `CountedLayer`, `ActivationCount`
"""
import numpy as np, pytest, random, torch
from collections import UserDict
from functools import partial
from torch import nn
from torch.distributions import Beta
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchvision.models import resnet18
from fastai.text.all import (AWD_LSTM, DataLoader, DataLoaders, LMDataLoader, Learner, MixUp, ModelResetter,
    Module, ProgressCallback, RNNCallback, RNNRegularizer, awd_lstm_clas_config, awd_lstm_lm_config,
    get_language_model, get_text_classifier, noop)
from fastai.tabular.model import TabularModel
from fastai.vision.gan import GANLearner
from fastai.vision.learner import unet_learner, vision_learner
from fastaccum.testing import Float32Loss

# Data and loaders

def random_floats(*shape):
    "Return normally distributed numbers in double precision, the same numbers in each call"
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()

def random_ints(high, *shape):
    "Return integers from 0 to `high`-1, the same integers in each call"
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))

def tensor_loaders(*tensors, bs=8):
    "Return DataLoaders whose samples are the rows of these tensors, for training and validation"
    return DataLoaders(*(DataLoader(TensorDataset(*tensors), bs=bs) for _ in range(2)))

def with_loaders(learn, *dls):
    "Replace the first loaders of the Learner by `dls`, and return the Learner"
    learn.dls = DataLoaders(*dls, *learn.dls.loaders[len(dls):])
    return learn

class MappingBatch(UserDict):
    "A batch like Hugging Face's `BatchEncoding`: a mapping, but no dict, and `len` counts its keys"

# Any Learner

def all_params(m):
    "Return all parameters in one group, as a `splitter` does"
    return [list(m.parameters())]

def silence_in_double(learn):
    "Cast the model to double precision, switch progress bar and table off, and return the Learner"
    learn.remove_cb(ProgressCallback)
    learn.logger,learn.model = noop,learn.model.double()
    return learn.add_cb(Float32Loss())

def replaced_methods(learn):
    "Return the names of methods that were replaced on this Learner or on a module of its model"
    return [nm for o in (learn,*learn.model.modules()) for nm in vars(o) if callable(getattr(type(o), nm, None))]

# Applications: each function takes the probability of dropout and arguments of the Learner; the data has
# 20 samples

def half_resnet18(**kwargs):
    "Return a resnet18 without its last two stages"
    m = resnet18()
    m.layer3 = m.layer4 = nn.Identity()
    return m

def vision(drop, bs=8, **kwargs):
    dls = tensor_loaders(random_floats(20, 3, 16, 16), random_ints(3, 20), bs=bs)
    return vision_learner(dls, half_resnet18, n_out=3, pretrained=False, normalize=False, ps=drop, lin_ftrs=[16],
        **kwargs)

def unet(drop, **kwargs):
    dls = tensor_loaders(random_floats(20, 3, 16, 16), random_ints(3, 20, 16, 16))
    learn = unet_learner(dls, resnet18, cut=5, n_out=3, pretrained=False, normalize=False, **kwargs)
    # remove `ToTensorBase`, which casts double to single precision
    learn.model.layers = learn.model.layers[:-1]
    return learn

def awd_lstm_config(config, drop):
    """Return fastai's config with small layers

    `weight_p` is never 0, with which fastai 2.8.12 fails on a CPU.
    """
    ps = dict(output_p=drop, hidden_p=drop, input_p=drop, embed_p=drop, weight_p=drop or 1e-30)
    return config|dict(emb_sz=6, n_hid=8, n_layers=2)|ps

def text_classifier(drop, **kwargs):
    "Return a classifier of texts of 11 tokens, whose encoder runs three times in a forward pass"
    config = awd_lstm_config(awd_lstm_clas_config, drop)
    model = get_text_classifier(AWD_LSTM, 20, 3, seq_len=4, config=config, ps=[drop], lin_ftrs=[8])
    dls = tensor_loaders(random_ints(18, 20, 11)+2, random_ints(3, 20))
    return Learner(dls, model, cbs=[ModelResetter(),RNNCallback()], **kwargs)

def language_model(drop, **kwargs):
    """Return a language model, which keeps a hidden state for each row of the batch

    A callback penalises activations.
    """
    dls = DataLoaders(*(LMDataLoader([*random_ints(18, 24, 7)+2], bs=8, seq_len=5) for _ in range(2)))
    model = get_language_model(AWD_LSTM, 20, awd_lstm_config(awd_lstm_lm_config, drop))
    return Learner(dls, model, cbs=[ModelResetter(),RNNCallback(),RNNRegularizer(2, 1)], **kwargs)

def tabular(drop, **kwargs):
    model = TabularModel([(4,3),(4,3)], 5, 3, [12,10,8], ps=drop, embed_p=drop)
    dls = tensor_loaders(random_ints(4, 20, 2), random_floats(20, 5), random_ints(3, 20))
    return Learner(dls, model, **kwargs)

def transformer(drop, nm='Bert', **kwargs):
    "Return a classifier of Hugging Face, 'Bert' or 'GPT2', whose output is a mapping with logits"
    import transformers as tf
    size = dict(
        Bert=dict(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=drop, attention_probs_dropout_prob=drop),
        GPT2=dict(n_embd=16, n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, pad_token_id=0,
            embd_pdrop=drop, attn_pdrop=drop, resid_pdrop=drop))[nm]
    cls = getattr(tf, f'{nm}ForSequenceClassification')
    model = cls(cls.config_class(vocab_size=50, **size, num_labels=3))
    return Learner(tensor_loaders(random_ints(49, 20, 9)+1, random_ints(3, 20)), model, **kwargs)

def t5(drop, **kwargs):
    "Return an encoder-decoder model, whose decoder fills a cache of keys and values also in training"
    import transformers as tf
    cfg = tf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=drop,
        decoder_start_token_id=0)
    class SameInputs(tf.T5ForConditionalGeneration):
        def forward(self, x): return super().forward(input_ids=x, decoder_input_ids=x)
    return Learner(tensor_loaders(random_ints(49, 20, 9)+1, random_ints(49, 20, 9)), SameInputs(cfg), **kwargs)

def wgan(drop, loss_func=None, **kwargs):
    "Return a GAN, whose loss functions also call the generator and the critic"
    generator = nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 48), nn.Unflatten(1, (3,4,4)))
    critic = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    dls = tensor_loaders(random_floats(20, 6, 1, 1), random_floats(20, 3, 4, 4))
    return GANLearner.wgan(dls, generator, critic, **kwargs)

applications = dict(vision=vision, unet=unet, text_classifier=text_classifier, language_model=language_model,
    tabular=tabular, bert=transformer, gpt2=partial(transformer, nm='GPT2'), t5=t5, wgan=wgan)

def make_application(nm, drop=0., **kwargs):
    """Return the Learner of the application `nm`, with the same weights in each call

    `drop` is the dropout.
    """
    if nm in ('bert','gpt2','t5'): pytest.importorskip('transformers')
    torch.manual_seed(0)
    return silence_in_double(applications[nm](drop, **kwargs))

# Losses, and MixUp

def logits_of(out):
    "Return the logits from the output of a model: the output itself, or its entry 'logits'"
    return out if isinstance(out, torch.Tensor) else out['logits']

def cross_entropy(out, y):
    "Return the cross-entropy of samples, or of tokens if targets are sequences"
    return F.cross_entropy(logits_of(out).transpose(1, -1) if y.ndim==2 else logits_of(out), y)

class MixUpLoss(nn.CrossEntropyLoss):
    "Cross-entropy for MixUp"
    y_int = True   # tells fastai's MixUp that targets are class numbers

class DoubleMixUp(MixUp):
    "MixUp whose mixing weights are in double precision"
    def before_fit(self): self.distrib = Beta(*[torch.tensor(0.4, dtype=torch.float64)]*2)

# Layers

class ActivationCount:
    """Counts the samples whose activations are in memory, summed over all `CountedLayer`s

    An instance stands for the activations of `n` samples of one layer: its `__init__` adds `n`, its
    `__del__` subtracts `n`. Memory runs out if the sum exceeds `cap`.
    """
    now = 0   # samples in memory now
    peak = 0   # the largest value of `now`
    cap = 10**9   # samples
    def __init__(self, n):
        self.n = n
        ActivationCount.now += n
        ActivationCount.peak = max(ActivationCount.now, ActivationCount.peak)
        if ActivationCount.now>ActivationCount.cap: raise torch.OutOfMemoryError('planted')
    def __del__(self): ActivationCount.now -= self.n
    @classmethod
    def reset(cls, cap=10**9): cls.peak,cls.cap = cls.now,cap

class _CountActivations(torch.autograd.Function):
    "The identity, which keeps its output for the backward pass and counts it with `ActivationCount`"
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.counted = ActivationCount(len(x))
        ctx.save_for_backward(y)
        return x.clone()
    @staticmethod
    def backward(ctx, g): return ctx.saved_tensors and g

class CountedLayer(Module):
    "A layer with `n` inputs and `n` outputs, whose activations `ActivationCount` counts"
    def __init__(self, n): self.lin = nn.Linear(n, n)
    def forward(self, x): return _CountActivations.apply(self.lin(x).tanh())

class StatefulLinear(nn.Linear):
    """A layer whose output in training depends on every kind of state that a forward pass can change

    The state consists of a buffer that is replaced, a buffer that is changed in place, attributes that
    are no buffers, and the random numbers of five generators: those of Python, NumPy and torch, and two
    of the layer.
    """
    def __init__(self, n):
        super().__init__(n, n)
        self.n_calls,self.drawn,self.last_mean = 0,[],0
        self.torch_rng,self.python_rng = torch.Generator().manual_seed(0),random.Random(0)
        self.register_buffer('mean', None)
        self.register_buffer('n_moved', torch.zeros(()))
    def forward(self, x):
        if not self.training: return super().forward(x)
        self.n_calls += 1
        self.n_moved.add_(1)
        self.drawn.append(random.random()+np.random.rand()+torch.rand(1).item()
            +torch.rand(1, generator=self.torch_rng).item())
        batch_mean = x.detach().mean(0)
        self.mean = batch_mean if self.mean is None else .9*self.mean+.1*batch_mean
        from_last_pass = self.last_mean+self.python_rng.random()
        self.last_mean = x.detach().mean()
        out = super().forward(x-self.mean).sin()*self.n_calls/float(self.n_moved)
        return out+self.drawn[-1]+len(self.drawn)+from_last_pass
    def state(self):
        "Return all state that is not in a buffer"
        return self.n_calls,self.drawn,self.last_mean,self.torch_rng.get_state(),self.python_rng.getstate()
