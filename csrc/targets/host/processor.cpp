// The Python module mok_modular._host_processor: what the extension was compiled for, and what this processor has. To be
// asked before the extension is loaded, so it is compiled for any processor, and by itself: nothing else is linked to it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "targets/host/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mok::host {
namespace {

struct InstructionSet {
  const char* name;
  unsigned leaf, subleaf;
  int reg, bit;
  unsigned long long state;
};
#define MOK_INSTRUCTION_SET(name, macro, leaf, subleaf, reg, bit, state) {#name, leaf, subleaf, reg, bit, state},
constexpr InstructionSet kSets[] = {MOK_INSTRUCTION_SETS(MOK_INSTRUCTION_SET){nullptr, 0, 0, 0, 0, 0}};

#if defined(__x86_64__)

bool has_bit(unsigned leaf, unsigned subleaf, int reg, int bit) {
  unsigned found[4] = {};
  return __get_cpuid_count(leaf, subleaf, &found[0], &found[1], &found[2], &found[3]) != 0 && (found[reg] >> bit & 1u);
}

// Which registers the operating system saves, XCR0.
unsigned long long saved_state() {
  constexpr int kOsxsave = 27;
  if (!has_bit(1, 0, 2, kOsxsave)) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<unsigned long long>(high) << 32 | low;
}

bool is_here(const InstructionSet& set) {
  // Where the highest subleaf of leaf 7 is 0, subleaf 1 reads as zeros.
  return has_bit(set.leaf, set.subleaf, set.reg, set.bit) && (saved_state() & set.state) == set.state;
}

#else

bool is_here(const InstructionSet&) { return false; }

#endif

template <class Predicate>
PyObject* names_where(Predicate is_wanted) {
  PyObject* names = PyList_New(0);
  for (int i = 0; names && kSets[i].name; ++i) {
    if (!is_wanted(i)) continue;
    PyObject* name = PyUnicode_FromString(kSets[i].name);
    if (!name || PyList_Append(names, name) != 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* built_for(PyObject*, PyObject*) {
  return names_where([](int i) { return kIsBuiltFor[i]; });
}
PyObject* here(PyObject*, PyObject*) {
  return names_where([](int i) { return is_here(kSets[i]); });
}
PyObject* flags(PyObject*, PyObject*) { return PyUnicode_FromString(MOK_FLAGS); }

PyMethodDef kMethods[] = {
    {"built_for", built_for, METH_NOARGS, "The instruction sets that the extension may use."},
    {"here", here, METH_NOARGS, "The instruction sets that this processor and its operating system have."},
    {"flags", flags, METH_NOARGS, "The flags that the extension was compiled with."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef kModule = {PyModuleDef_HEAD_INIT,
                       "_host_processor",
                       "What the extension was compiled for.",
                       -1,
                       kMethods,
                       nullptr,
                       nullptr,
                       nullptr,
                       nullptr};

}  // namespace
}  // namespace mok::host

PyMODINIT_FUNC PyInit__host_processor() { return PyModule_Create(&mok::host::kModule); }
