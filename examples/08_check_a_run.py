"""Ask whether accumulation gives the result of the full-batch run with your model, and if not, why."""
from tempfile import TemporaryDirectory
from fastai.vision.all import *
from fastaccum import FreezeBN, GradientAccumulation  # isort: skip
from sklearn.datasets import load_sample_images

set_seed(0)
tmp = TemporaryDirectory()
path = Path(tmp.name)   # the images are pieces of two photographs that come with scikit-learn
for name, photo in zip(('china', 'flower'), load_sample_images().images):
    (path/name).mkdir()
    for i in range(64): Image.fromarray(photo[5*i:][:32, 8*i:][:, :32]).save(path/name/f'{i}.png')
dls = ImageDataLoaders.from_folder(path, valid_pct=0.25, seed=0, bs=8, num_workers=0)

learn = vision_learner(dls, resnet18, pretrained=False, cbs=GradientAccumulation(32))
result = learn.accum_check()
print(result)   # BatchNorm and dropout make a difference; the table says what to do about each
assert not result.ok

# with BatchNorm frozen, and a head without BatchNorm and dropout, accumulation gives the same run
learn = vision_learner(dls, resnet18, pretrained=False, lin_ftrs=[], first_bn=False, ps=0.)
learn.recalibrate_bn()   # not needed for a pretrained body, which has statistics already
result = learn.accum_check(cbs=[GradientAccumulation(32), FreezeBN(lambda m: m[0])])
print(result)
assert result.ok
