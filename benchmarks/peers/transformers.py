"transformers' Trainer: with a loss that honours `num_items_in_batch`, and with a BERT classification head as it comes."
import tempfile, torch, transformers
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification
from transformers import Trainer, TrainingArguments
from .cases import Data
from .peer import Peer, whole
transformers.logging.set_verbosity_error()

class Named(nn.Module):
    "Takes and returns what the Trainer wants"
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, x): return dict(logits=self.model(x))

class Loader(Trainer):
    "With the samples in order: the Trainer's own loader shuffles"
    def get_train_dataloader(self): return self.accelerator.prepare(self.train_dataset)

class NumItems(Peer):
    key,title,package = 'hf','transformers, num_items_in_batch','transformers'
    docs = 'https://huggingface.co/docs/transformers/grad_accumulation'
    how = 'Trainer(compute_loss_func): a summed loss divided by num_items_in_batch'
    as_dicts,trainer_cls = staticmethod(Data.as_dicts),Loader

    def wrap(self, model): return Named(model)
    def loss(self):
        def f(out, labels, num_items_in_batch=None):
            return self.case.loss(out['logits'], labels, reduction='sum')/num_items_in_batch
        return f

    def fit(self, data, epochs, micro, accum):
        case,k = self.case,whole(micro, accum)
        opt = torch.optim.SGD(self.model.parameters(), lr=case.lr, momentum=case.mom)
        sched = case.lambda_lr(opt, case.steps(accum, len(data)))
        fast = case.kind=='fast'
        with tempfile.TemporaryDirectory() as tmp:
            args = TrainingArguments(tmp, per_device_train_batch_size=micro, gradient_accumulation_steps=k,
                num_train_epochs=epochs, max_grad_norm=case.clip or 0.,
                fp16=case.amp=='fp16', bf16=case.amp=='bf16', use_cpu=case.device=='cpu',
                logging_strategy='no' if fast else 'steps', logging_steps=1, save_strategy='no', report_to='none',
                disable_tqdm=True, remove_unused_columns=False)
            self.trainer = self.trainer_cls(self.wrap(self.model), args,
                train_dataset=data.loader(micro, self.as_dicts), optimizers=(opt,sched),
                compute_loss_func=self.loss())
            for cb in (transformers.PrinterCallback,transformers.ProgressCallback): self.trainer.remove_callback(cb)
            self.trainer.train()

    def losses(self): return [o['loss'] for o in self.trainer.state.log_history if 'loss' in o]

class Bert(nn.Module):
    "A small BERT with a classification head, called like the other models; `inner` is what transformers has"
    def __init__(self, case):
        super().__init__()
        config = BertConfig(hidden_size=5, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8, vocab_size=2,
            num_labels=3, hidden_dropout_prob=0., attention_probs_dropout_prob=0.,
            problem_type='single_label_classification', attn_implementation='eager')
        self.inner = (BertForTokenClassification if case.tokens
            else BertForSequenceClassification)(config).to(case.dtype)
    def forward(self, x): return self.inner(inputs_embeds=x if x.dim()==3 else x[:,None]).logits

class BertHead(NumItems):
    key,title = 'hf-bert','transformers, BERT head'
    how = 'Trainer with BertForSequenceClassification or BertForTokenClassification as they come'

    @staticmethod
    def as_dicts(items):
        b = Data.as_dicts(items)
        return dict(inputs_embeds=b['x'] if b['x'].dim()==3 else b['x'][:,None], labels=b['labels'])
    def make_model(self, case):
        torch.manual_seed(0)
        return Bert(case)
    def wrap(self, model): return model.inner
    def loss(self): return None

class BertTold(BertHead):
    key,title = 'hf-bert-told','transformers, BERT head, loss scaled'
    how = 'as before, with loss_is_scaled_for_ga=False, since the head does not use num_items_in_batch'
    trainer_cls = type('Told', (Loader,), dict(loss_is_scaled_for_ga=False))

peers = [NumItems, BertHead, BertTold]
