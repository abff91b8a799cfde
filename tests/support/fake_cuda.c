// A driver that records what it is asked, built against NVIDIA's own cuda.h, so that structures and argument orders are the real ones.
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static char said[1 << 16];
static pthread_mutex_t saying = PTHREAD_MUTEX_INITIALIZER;
/* Device d has the context 16 + d; its modules and kernels carry the device along. Each thread has a current context of its own. */
static __thread size_t current;
#define SAY(...) do { \
    pthread_mutex_lock(&saying); \
    snprintf(said + strlen(said), sizeof(said) - strlen(said), __VA_ARGS__); \
    pthread_mutex_unlock(&saying); \
} while (0)

const char* fake_said(void) { return said; }
size_t fake_current(void) { return current; }
void fake_forget(void) { said[0] = 0, current = 0; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult code, const char** name) { return *name = code == CUDA_ERROR_INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE" : "OTHER", CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)current, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { SAY("context %d\n", device); return *context = (CUcontext)(size_t)(16 + device), CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return current = (size_t)context, CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    SAY("load %.4s\n", (const char*)image);
    if (current == 0) return CUDA_ERROR_INVALID_CONTEXT;
    *module = (CUmodule)(current + 100);
    return memcmp(image, "bad", 3) == 0 ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    SAY("kernel %s\n", name);
    *function = (CUfunction)(current + 200);
    return module == (CUmodule)(current + 100) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) {
        SAY("carveout %d\n", value);
        return CUDA_SUCCESS;
    }
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
    return value > 227 * 1024 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
    if (function != (CUfunction)(current + 200)) return CUDA_ERROR_INVALID_HANDLE;
    return *blocks = shared > 114 * 1024 ? 1 : 2048 / threads, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction function, const CUlaunchConfig* c) {
    if (function != (CUfunction)(current + 200)) return CUDA_ERROR_INVALID_HANDLE;
    if (c->numAttrs != 1 || c->attrs[0].id != CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return CUDA_ERROR_INVALID_VALUE;
    if (c->gridDimX % c->attrs[0].value.clusterDim.x != 0) return CUDA_ERROR_INVALID_VALUE;
    return *clusters = (c->sharedMemBytes > 114 * 1024 ? 1 : 2048 / c->blockDimX) * (128 / c->attrs[0].value.clusterDim.x), CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute != CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) return CUDA_ERROR_INVALID_VALUE;
    return *value = 132 - device, CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    if ((size_t)map % 64 != 0 || (size_t)address % 16 != 0 || type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || rank != 3) return CUDA_ERROR_INVALID_VALUE;
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_64B || promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_128B ||
        fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || steps[0] != 1 || steps[1] != 1 || steps[2] != 1) return CUDA_ERROR_INVALID_VALUE;
    SAY("map %zx of %llu %llu %llu strides %llu %llu box %u %u %u\n", (size_t)address, (unsigned long long)sizes[0], (unsigned long long)sizes[1],
        (unsigned long long)sizes[2], (unsigned long long)strides[0], (unsigned long long)strides[1], box[0], box[1], box[2]);
    memset(map, 7, sizeof(*map));
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
    if (extra != NULL || function != (CUfunction)(current + 200)) return CUDA_ERROR_INVALID_HANDLE;
    SAY("launch %u %u %u x %u %u %u shared %u stream %zu", c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
        c->sharedMemBytes, (size_t)c->hStream);
    for (unsigned i = 0; i < c->numAttrs; ++i) {
        if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) SAY(" cooperative %d", c->attrs[i].value.cooperative);
        else if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            SAY(" cluster %u %u %u", c->attrs[i].value.clusterDim.x, c->attrs[i].value.clusterDim.y, c->attrs[i].value.clusterDim.z);
        else if (c->attrs[i].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) return CUDA_ERROR_INVALID_VALUE;
        else SAY(" programmatic %d", c->attrs[i].value.programmaticStreamSerializationAllowed);
    }
    SAY(" first %zx\n", *(size_t*)parameters[0]);
    return CUDA_SUCCESS;
}
