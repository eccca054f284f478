"Texts: fastai's own models, recurrent networks from scratch, Hugging Face's models"
import random
from fastai.text.all import *
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification,
    AutoModelForTokenClassification)
from .data import *

vocab = {o:i+1 for i,o in enumerate(sorted(set(words[:600])))}
ids = torch.tensor([vocab[o] for o in words[:600]])
small = dict(emb_sz=8, n_hid=10, n_layers=2)

def text_loaders(bs, is_lm):
    "40 texts of 6 to 12 words for training"
    df = pd.DataFrame([dict(text=' '.join(words[i*12:][:6+i%7]), label='ab'[i%2]) for i in range(n_train+n_valid)])
    text = TextBlock.from_df('text', is_lm=is_lm, seq_len=6, min_freq=1, tok=BaseTokenizer(), rules=[], n_workers=0)
    block = DataBlock((text,) if is_lm else (text,CategoryBlock), get_x=lambda o: o.text,
        get_y=None if is_lm else lambda o: o.label, splitter=lambda _: (range(n_train),range(n_train, n_train+n_valid)))
    return block.dataloaders(df, bs=bs, num_workers=0, device='cpu')

@set_up('fastai/fastbook', '10_nlp.ipynb', 'language model, AWD-LSTM',
    frozen_first('fit_one_cycle', 2e-2, 2e-3))
def imdb_lm(bs):
    return language_model_learner(text_loaders(bs, True), AWD_LSTM, config=awd_lstm_lm_config|small, drop_mult=0.3,
        pretrained=False, metrics=[accuracy,Perplexity()])

def gradual(learn, cbs):
    learn.fit_one_cycle(1, 2e-2, cbs=cbs)
    learn.freeze_to(-2)
    learn.fit_one_cycle(1, slice(1e-2/(2.6**4), 1e-2), cbs=cbs)
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-3/(2.6**4), 1e-3), cbs=cbs)

@set_up('fastai/fastbook', '10_nlp.ipynb', 'text classifier, gradual unfreezing', gradual)
def imdb_classifier(bs):
    return text_classifier_learner(text_loaders(bs, False), AWD_LSTM, config=awd_lstm_clas_config|small, drop_mult=0.5,
        pretrained=False, metrics=accuracy)

class LMModel7(Module):
    "An LSTM that goes on from where the batch before has ended; the weights of input and output are the same"
    def __init__(self, n_vocab, n_hidden, n_layers, p, bs):
        self.i_h,self.drop = nn.Embedding(n_vocab, n_hidden),nn.Dropout(p)
        self.rnn,self.h_o = nn.LSTM(n_hidden, n_hidden, n_layers, batch_first=True),nn.Linear(n_hidden, n_vocab)
        self.h_o.weight = self.i_h.weight
        self.h = [torch.zeros(n_layers, bs, n_hidden) for _ in range(2)]
    def forward(self, x):
        raw,h = self.rnn(self.i_h(x), self.h)
        self.h,out = [o.detach() for o in h],self.drop(raw)
        return self.h_o(out),raw,out
    def reset(self):
        for o in self.h: o.zero_()

def group_chunks(ds, bs):
    "In an order in which each row of a batch goes on where that of the batch before ends"
    m = len(ds)//bs
    return [ds[i+m*j] for i in range(m) for j in range(bs)]

def chunks(bs, sl=6):
    seqs = [(ids[i:i+sl], ids[i+1:i+sl+1]) for i in range(0, sl*(48+16), sl)]
    train,valid = (group_chunks(o, bs) for o in (seqs[:48],seqs[48:]))
    return loaders(bs, train+valid, n=48, shuffle=False)

@set_up('fastai/fastbook', '12_nlp_dive.ipynb', 'an LSTM that keeps its state, `RNNRegularizer`',
    by('fit_one_cycle', 2, 1e-2, wd=0.1))
def lstm_with_state(bs):
    dls = chunks(bs)
    dls.valid.bs = bs
    return Learner(dls, LMModel7(len(vocab)+1, 10, 2, 0.4, bs), loss_func=CrossEntropyLossFlat(), metrics=accuracy,
        cbs=rnn_cbs(alpha=2, beta=1))

class Seq2Seq(Module):
    "Predicts word by word, at random from its own words or those of the target"
    def __init__(self, n_vocab, n=8):
        self.emb,self.enc,self.dec = nn.Embedding(n_vocab, n),nn.GRU(n, n, batch_first=True),nn.GRUCell(n, n)
        self.out = nn.Linear(n, n_vocab)
    def forward(self, src, trg, ratio=0.5):
        h,word,outs = self.enc(self.emb(src))[1][0],trg[:,0],[]
        for t in range(trg.shape[1]):
            h = self.dec(self.emb(word), h)
            outs.append(self.out(h))
            word = trg[:,t] if random.random()<ratio else outs[-1].argmax(1)
        return torch.stack(outs, 1)

class TeacherForcingCallback(Callback):
    "The model gets the target, too"
    def __init__(self, ratio=0.5): self.ratio = ratio
    def before_batch(self): self.learn.xb = (self.x,self.y,self.ratio)

@set_up('walkwithfastai/walkwithfastai.github.io',
    'nbs/live_streams/Exploring the fastai Callback System/Callbacks.Seq2Seq.ipynb', 'translation with teacher forcing',
    still=lambda learn: setattr(learn.teacher_forcing, 'ratio', 1.))
def teacher_forcing(bs):
    pairs = [(ids[i*5:i*5+5], ids[i*5:i*5+5].flip(0)) for i in range(52)]
    return Learner(loaders(bs, pairs), Seq2Seq(len(vocab)+1), loss_func=CrossEntropyLossFlat(),
        cbs=TeacherForcingCallback())

# Hugging Face's models

def config(arch, **kwargs):
    "The configuration of a small model; GPT-2 takes these names, too"
    return AutoConfig.for_model(arch, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, vocab_size=len(vocab)+1, **kwargs)

class DropOutput(Callback):
    "Only the first of the model's outputs is the prediction"
    def after_pred(self): self.learn.pred = self.pred[0]

@set_up('fastai/fastai', 'nbs/39_tutorial.transformers.ipynb', 'GPT-2 with `DropOutput`', by('fit_one_cycle', 2, 1e-3))
def gpt2(bs):
    net = AutoModelForCausalLM.from_config(config('gpt2'))
    return Learner(text_loaders(bs, True), net, loss_func=CrossEntropyLossFlat(), cbs=DropOutput(),
        metrics=Perplexity())

class PreCalculatedCrossEntropyLoss(CrossEntropyLossFlat):
    "The model returns its loss"
    def __call__(self, inp, targ, **kwargs): return torch.tensor(0.)

class BaseModelWrapper(Module):
    "Calls a model of transformers with the names in the batch"
    def __init__(self, hf_model): self.hf_model = hf_model
    def forward(self, x): return self.hf_model(**x)

class BaseModelCallback(Callback):
    "Takes the scores, and the loss, from what the model returns"
    def before_batch(self): self.hf_loss = None
    def after_pred(self):
        out = self.pred
        if isinstance(self.loss_func, PreCalculatedCrossEntropyLoss): self.hf_loss = out['loss'].float()
        self.learn.pred = out['logits']
    def after_loss(self):
        if self.hf_loss is None: return
        self.learn.loss_grad = self.hf_loss
        self.learn.loss = self.learn.loss_grad.clone()

def named(bs, label_of):
    "Batches with the names that a tokenizer gives, and labels among them"
    def item(i):
        n = 4+i%5
        x = ids[i*8:i*8+8].where(torch.arange(8)<n, 0)
        return dict(input_ids=x, attention_mask=(x>0).long(), labels=label_of(i, x)),label_of(i, x)
    return loaders(bs, [item(i) for i in range(52)])

blurr_fit = frozen_first('fit_one_cycle', 1e-3, slice(1e-7, 1e-4))

def blurr_splitter(m): return [params(m.hf_model.bert), params(m.hf_model.classifier)]

@set_up('ohmeow/blurr', 'blurr/text/modeling/core.py', 'text classifier whose model returns the loss', blurr_fit)
def blurr_texts(bs):
    net = AutoModelForSequenceClassification.from_config(config('bert', num_labels=2))
    return Learner(named(bs, lambda i,x: torch.tensor(i%2)), BaseModelWrapper(net), splitter=blurr_splitter,
        loss_func=PreCalculatedCrossEntropyLoss(), cbs=BaseModelCallback, metrics=accuracy)

@set_up('ohmeow/blurr', 'blurr/text/modeling/token_classification.py', 'labels of tokens, of which some are -100',
    blurr_fit)
def blurr_tokens(bs):
    net = AutoModelForTokenClassification.from_config(config('bert', num_labels=3))
    return Learner(named(bs, lambda i,x: torch.where(x>0, x%3, -100)), BaseModelWrapper(net), splitter=blurr_splitter,
        loss_func=PreCalculatedCrossEntropyLoss(), cbs=BaseModelCallback)

class Copier(Module):
    "A transformer that reads from left to right"
    def __init__(self, n_vocab, n=16):
        self.emb,self.out = nn.Embedding(n_vocab, n),nn.Linear(n, n_vocab)
        self.body = nn.TransformerEncoderLayer(n, 2, 32, dropout=0.1, batch_first=True)
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.out(self.body(self.emb(x), mask))

@set_up('arampacha/reformer_fastai', 'reformer_fastai/expscript.py', 'sequences of which the first half is ignored')
def twin_sequences(bs):
    def item(i):
        x = torch.cat([torch.zeros(1).long(), ids[i:i+1+i%4]])
        x = torch.cat([x, x, torch.zeros(10-2*len(x)).long()])
        y = x.roll(-1)
        y[:len(ids[i:i+1+i%4])+1] = -100
        return x,y
    return Learner(loaders(bs, [item(i) for i in range(52)], shuffle=False), Copier(len(vocab)+1),
        loss_func=CrossEntropyLossFlat(ignore_index=-100))
