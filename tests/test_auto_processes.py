"""Memory that runs out on some of several processes: the run is that of one process where it does not, and nobody waits
for another longer than the time limit."""
import pytest
from launch import check, launching, script_of

script,cases = script_of('auto_processes.py')
on_three = ['each_stage_on_each_process_in_each_batch','several_at_once','loaders_of_their_own','validation']
launches = launching(script, {2:cases, 3:on_three})

@pytest.mark.parametrize('case', cases)
def test_two_processes(launches, case): check(launches, 2, case)

@pytest.mark.parametrize('case', on_three)
def test_three_processes(launches, case): check(launches, 3, case)
