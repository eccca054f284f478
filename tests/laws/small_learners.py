"Small Learners as users of fastai build them, in double precision; modules and callbacks of several laws."
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

def gauss(*shape): return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()
def whole(high, *shape): return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))
def loaders(*ts, bs=8): return DataLoaders(*(DataLoader(TensorDataset(*ts), bs=bs) for _ in range(2)))
def all_params(m): return [list(m.parameters())]

def with_loaders(learn, *dls):
    learn.dls = DataLoaders(*dls, *learn.dls.loaders[len(dls):])
    return learn

def quiet(learn):
    "In double precision, without bar and table"
    learn.remove_cb(ProgressCallback)
    learn.logger,learn.model = noop,learn.model.double()
    return learn.add_cb(Float32Loss())

# Each takes a probability of dropout, and other arguments of the Learner

def half_resnet18(**kwargs):
    m = resnet18()
    m.layer3 = m.layer4 = nn.Identity()
    return m

def vision(drop, bs=8, **kwargs):
    return vision_learner(loaders(gauss(20, 3, 16, 16), whole(3, 20), bs=bs), half_resnet18, n_out=3, pretrained=False,
        normalize=False, ps=drop, lin_ftrs=[16], **kwargs)

def unet(drop, **kwargs):
    dls = loaders(gauss(20, 3, 16, 16), whole(3, 20, 16, 16))
    learn = unet_learner(dls, resnet18, cut=5, n_out=3, pretrained=False, normalize=False, **kwargs)
    learn.model.layers = learn.model.layers[:-1]   # `ToTensorBase`, which makes single precision of double
    return learn

def config(o, drop):   # fastai 2.8.12 fails on a CPU where weights have no dropout at all
    ps = dict(output_p=drop, hidden_p=drop, input_p=drop, embed_p=drop, weight_p=drop or 1e-30)
    return o|dict(emb_sz=6, n_hid=8, n_layers=2)|ps

def text_classifier(drop, **kwargs):
    "Its encoder runs three times in a forward pass"
    model = get_text_classifier(AWD_LSTM, 20, 3, seq_len=4, config=config(awd_lstm_clas_config, drop), ps=[drop],
        lin_ftrs=[8])
    return Learner(loaders(whole(18, 20, 11)+2, whole(3, 20)), model, cbs=[ModelResetter(),RNNCallback()], **kwargs)

def language_model(drop, **kwargs):
    "A hidden state of each row, and penalties on the outputs of layers"
    dls = DataLoaders(*(LMDataLoader([*whole(18, 24, 7)+2], bs=8, seq_len=5) for _ in range(2)))
    model = get_language_model(AWD_LSTM, 20, config(awd_lstm_lm_config, drop))
    return Learner(dls, model, cbs=[ModelResetter(),RNNCallback(),RNNRegularizer(2, 1)], **kwargs)

def tabular(drop, **kwargs):
    model = TabularModel([(4,3),(4,3)], 5, 3, [12,10,8], ps=drop, embed_p=drop)
    return Learner(loaders(whole(4, 20, 2), gauss(20, 5), whole(3, 20)), model, **kwargs)

def transformer(drop, nm='Bert', **kwargs):
    import transformers as tf
    size = dict(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=drop, attention_probs_dropout_prob=drop) if nm=='Bert' else dict(vocab_size=50, n_embd=16,
        n_layer=3, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, pad_token_id=0, embd_pdrop=drop,
        attn_pdrop=drop, resid_pdrop=drop)
    cls = getattr(tf, f'{nm}ForSequenceClassification')
    return Learner(loaders(whole(49, 20, 9)+1, whole(3, 20)), cls(cls.config_class(**size, num_labels=3)), **kwargs)

def t5(drop, **kwargs):
    "Encoder and decoder, with a cache of keys and values that is filled in training, too"
    import transformers as tf
    cfg = tf.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=drop,
        decoder_start_token_id=0)
    class Both(tf.T5ForConditionalGeneration):
        def forward(self, x): return super().forward(input_ids=x, decoder_input_ids=x)
    return Learner(loaders(whole(49, 20, 9)+1, whole(49, 20, 9)), Both(cfg), **kwargs)

def wgan(drop, loss_func=None, **kwargs):
    "The loss calls generator and critic, besides the Learner"
    generator = nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 48), nn.Unflatten(1, (3,4,4)))
    critic = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    return GANLearner.wgan(loaders(gauss(20, 6, 1, 1), gauss(20, 3, 4, 4)), generator, critic, **kwargs)

applications = dict(vision=vision, unet=unet, text_classifier=text_classifier, language_model=language_model,
    tabular=tabular, bert=transformer, gpt2=partial(transformer, nm='GPT2'), t5=t5, wgan=wgan)

def make(nm, drop=0., **kwargs):
    "The application `nm`"
    if nm in ('bert','gpt2','t5'): pytest.importorskip('transformers')
    torch.manual_seed(0)
    return quiet(applications[nm](drop, **kwargs))

def scores(out): return out if isinstance(out, torch.Tensor) else out['logits']
def cross_entropy(out, y): return F.cross_entropy(scores(out).transpose(1, -1) if y.ndim==2 else scores(out), y)

def replaced(learn):
    "Methods of the Learner, and of the modules of its model, that are not their class's"
    return [nm for o in (learn,*learn.model.modules()) for nm in vars(o) if callable(getattr(type(o), nm, None))]

class Held:
    "Samples whose activations are held, over all `Holds`; memory runs out with more than `cap`"
    now,most,cap = 0,0,10**9
    def __init__(self, n):
        self.n,Held.now = n,Held.now+n
        Held.most = max(Held.now, Held.most)
        if Held.now>Held.cap: raise torch.OutOfMemoryError('planted')
    def __del__(self): Held.now -= self.n
    @classmethod
    def reset(cls, cap=10**9): cls.most,cls.cap = cls.now,cap

class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.held = Held(len(x))
        ctx.save_for_backward(y)
        return x.clone()
    @staticmethod
    def backward(ctx, g): return ctx.saved_tensors and g

class Holds(Module):
    "A layer whose activations are counted by `Held`"
    def __init__(self, n): self.lin = nn.Linear(n, n)
    def forward(self, x): return _Hold.apply(self.lin(x).tanh())

class Own(nn.Linear):
    "In training depends on buffers that it moves, one in place, on what it keeps, and on numbers from five generators"
    def __init__(self, n):
        super().__init__(n, n)
        self.n,self.seen,self.last,self.gen,self.dice = 0,[],0,torch.Generator().manual_seed(0),random.Random(0)
        self.register_buffer('mean', None)
        self.register_buffer('sums', torch.zeros(()))
    def forward(self, x):
        if not self.training: return super().forward(x)
        self.n += 1
        self.seen.append(random.random()+np.random.rand()+torch.rand(1).item()+torch.rand(1, generator=self.gen).item())
        self.mean = x.detach().mean(0) if self.mean is None else .9*self.mean+.1*x.detach().mean(0)
        self.sums.add_(1)
        old,self.last = self.last+self.dice.random(),x.detach().mean()
        return super().forward(x-self.mean).sin()*self.n/float(self.sums)+self.seen[-1]+len(self.seen)+old
    def kept(self): return self.n,self.seen,self.last,self.gen.get_state(),self.dice.getstate()

class DoubleMixUp(MixUp):
    "Draws in double precision"
    def before_fit(self): self.distrib = Beta(*[torch.tensor(0.4, dtype=torch.float64)]*2)

class MixedLoss(nn.CrossEntropyLoss): y_int = True   # for MixUp

class Encoding(UserDict):
    "As Hugging Face's `BatchEncoding`: a mapping that is no dict, and is as long as it has keys"
