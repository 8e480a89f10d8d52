// What every CUDA source here may include.
#pragma once

// A kernel that is launched early may do what the one in front of it has no part in, before it waits for it. All of
// them wait, so that whoever waits for one has waited for everything before it.
__device__ __forceinline__ void wait_for_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
