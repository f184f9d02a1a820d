# What comes from Python packages of the build environment: the XLA FFI headers (jaxlib) and nanobind.

execute_process(
  COMMAND ${Python_EXECUTABLE} -c [[
import importlib.metadata, importlib.util, pathlib
spec = importlib.util.find_spec("jaxlib")  # where it is, without importing it: jax need not be installed
print(pathlib.Path(next(iter(spec.submodule_search_locations)), "include").as_posix())
print(importlib.metadata.version("jaxlib"))
]]
  OUTPUT_VARIABLE jaxlib_output ERROR_VARIABLE jaxlib_error RESULT_VARIABLE jaxlib_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REGEX REPLACE "\n" ";" jaxlib_output "${jaxlib_output}")
if(jaxlib_result EQUAL 0)
  list(GET jaxlib_output 0 JAX_DMA_FFI_INCLUDE_DIR)
  list(GET jaxlib_output 1 jaxlib_version)
endif()
set(ffi_header "${JAX_DMA_FFI_INCLUDE_DIR}/xla/ffi/api/c_api.h")
if(NOT jaxlib_result EQUAL 0 OR NOT EXISTS "${ffi_header}")
  message(FATAL_ERROR
    "jax_dma: the XLA FFI headers, which jaxlib ships, were not found for ${Python_EXECUTABLE}. Install jaxlib there "
    "(`pip install jaxlib`), or build without --no-build-isolation, which brings it.")
endif()
file(STRINGS "${ffi_header}" ffi_version REGEX "^#define XLA_FFI_API_(MAJOR|MINOR) ")
string(REGEX REPLACE "[^0-9]*([0-9]+)[^0-9]+([0-9]+).*" "\\1.\\2" ffi_version "${ffi_version}")
message(STATUS "jax_dma: XLA FFI ${ffi_version} from jaxlib ${jaxlib_version}")

execute_process(
  COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE nanobind_result)
if(NOT nanobind_result EQUAL 0)
  message(FATAL_ERROR
    "jax_dma: nanobind is not installed for ${Python_EXECUTABLE}. Install it there (`pip install nanobind`), or build "
    "without --no-build-isolation, which brings it.")
endif()
