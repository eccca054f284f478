"""A pretrained resnet34 on Oxford-IIIT Pets, as fastai's own tutorials train it: batches of 16, steps of 256 made of
batches of 16 with fastaccum and with fastai's own callback, and real batches of 256.

Each run is a `fine_tune` from the same pretrained weights. The seed chooses the new head, the order of the pictures and
the augmentation; the split into training and validation is the same in all runs. Accuracy is that of the validation
set, as a mean over seeds with its standard deviation. Memory is the most that torch had allocated on the GPU, time that
of the whole `fine_tune`. The three runs in steps of 256 have one learning rate; the run in steps of 16 has a quarter of
it, as the square root rule for Adam says.

`python benchmarks/pets.py` (a GPU, and a network for the pictures and the weights) prints a Markdown table and writes
`benchmarks/results/pets.json`, which the page "Images" shows. `--data imagenette` takes Imagenette (160 pixels).
`python benchmarks/pets.py --toy` tries the script without either: tiles of photographs that come with scikit-image,
a resnet18 without pretrained weights, steps of 64. It prints what a real run would, and writes to a temporary folder.
"""
import argparse, json, platform, sys, time, warnings
from datetime import date
from pathlib import Path
from statistics import mean, stdev
from tempfile import gettempdir
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fastai, torch
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastai.vision.all import (ImageDataLoaders, Resize, URLs, accuracy, aug_transforms, get_image_files, resnet18,
    resnet34, set_seed, untar_data, vision_learner)
import fastaccum
from fastaccum import AccumulationWarning, GradientAccumulation

results = Path(__file__).parent/'results'/'pets.json'

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

def tiles(size=32):
    "Tiles of three photographs: from which is it?"
    from PIL import Image
    from skimage import data
    path = Path(gettempdir())/'fastaccum-tiles'
    for name,photo in dict(cat=data.chelsea(), coffee=data.coffee(), rocket=data.rocket()).items():
        (path/name).mkdir(parents=True, exist_ok=True)
        h,w,_ = photo.shape
        for y in range(0, h-size+1, size):
            for x in range(0, w-size+1, size):
                Image.fromarray(photo[y:y+size,x:x+size]).save(path/name/f'{y}_{x}.png')
    def loaders(bs):
        return ImageDataLoaders.from_folder(path, valid_pct=0.2, seed=42, bs=bs, num_workers=0, item_tfms=Resize(size),
            batch_tfms=aug_transforms(size=size))
    return loaders

# Runs

def arms(micro, step, lr):
    "Of each run: the loader's batch size, samples in a step, the learning rate, and the callbacks"
    return {f'batches of {micro}': (micro, micro, lr*(micro/step)**0.5, []),
        f'{micro} → {step}, fastaccum': (micro, step, lr, [GradientAccumulation(step)]),
        f"{micro} → {step}, fastai's callback": (micro, step, lr, [FastaiGradientAccumulation(step)]),
        f'batches of {step}': (step, step, lr, [])}

def train(loaders, arch, pretrained, bs, lr, cbs, seed, epochs):
    "One `fine_tune`: accuracy, peak memory, seconds, and the number of optimizer steps"
    cuda = torch.cuda.is_available()
    set_seed(seed, reproducible=True)
    learn = vision_learner(loaders(bs), arch, pretrained=pretrained, metrics=accuracy)
    steps = Steps(learn)
    if cuda: torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with learn.no_bar(), learn.no_logging(): learn.fine_tune(epochs, lr, cbs=cbs)
    if cuda: torch.cuda.synchronize()
    res = dict(accuracy=round(learn.recorder.values[-1][-1], 4), seconds=round(time.perf_counter()-start, 1),
        mb=round(torch.cuda.max_memory_allocated()/2**20) if cuda else None, steps=steps.n)
    del learn
    if cuda: torch.cuda.empty_cache()
    return res

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
        mb = f"{mean(o['mb'] for o in runs)/1024:.1f} GiB" if runs[0]['mb'] else '–'
        rows.append(f"| {name} | {mean(acc):.1f} %{spread} | {mb} | {mean(o['seconds'] for o in runs):.0f} s | "
            f"{runs[0]['steps']} |")
    return '\n'.join(rows) + f"\n\n{res['what']}. Made {res['made']}."

def main():
    args = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    args.add_argument('--data', choices=['pets','imagenette'], default='pets')
    args.add_argument('--toy', action='store_true', help='try the script on photographs that ship, without a GPU')
    args.add_argument('--seeds', type=int, default=3)
    args.add_argument('--epochs', type=int, default=5, help='after the one in which only the head trains')
    args.add_argument('--lr', type=float, default=4e-3, help='of steps of 256')
    args.add_argument('--out', type=Path, help='where the result is written')
    args = args.parse_args()
    if not (args.toy or torch.cuda.is_available()): sys.exit('this needs a GPU; --toy tries the script without one')
    warnings.simplefilter('ignore', AccumulationWarning)
    micro,step = (8,64) if args.toy else (16,256)
    out = args.out or (Path(gettempdir())/'pets-toy.json' if args.toy else results)
    loaders = tiles() if args.toy else pets() if args.data=='pets' else imagenette()
    arch,pretrained = (resnet18,False) if args.toy else (resnet34,True)
    name = 'tiles of three photographs' if args.toy else args.data
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    kind = 'pretrained' if pretrained else 'not pretrained'
    res = dict(made=f'{date.today()}, {hardware}, fastaccum {fastaccum.__version__}, fastai {fastai.__version__}, '
        f'torch {torch.__version__}, python {platform.python_version()}',
        what=f'{arch.__name__} ({kind}) on {name}, `fine_tune({args.epochs})`, {args.seeds} seeds',
        runs={k:[] for k in arms(micro, step, args.lr)})
    for seed in range(args.seeds):
        for nm,(bs,_,lr,cbs) in arms(micro, step, args.lr).items():
            found = train(loaders, arch, pretrained, bs, lr, cbs, seed, args.epochs)
            res['runs'][nm].append(dict(seed=seed, lr=lr)|found)
            print(f'seed {seed}, {nm}:', found, flush=True)
            out.write_text(json.dumps(res|dict(table=table(res)), indent=1, ensure_ascii=False)+'\n', encoding='utf-8')
    print(f'\n{table(res)}\n\nWritten to {out.name}')

if __name__=='__main__': main()
