// Which instruction sets the host target's flags allow. Compiled with those flags, so it holds constants only: no code.
#include "targets/host/processor.h"

namespace mok::host {
namespace {

// A macro that the compiler has defined reads as its value; one that it has not, as its own name.
constexpr bool is_defined(const char* expanded) { return expanded[0] != '_'; }

}  // namespace

#define MOK_TEXT(...) #__VA_ARGS__
#define MOK_EXPANDED(macro) MOK_TEXT(macro)
#define MOK_IS_BUILT_FOR(name, macro, ...) is_defined(MOK_EXPANDED(macro)),
constexpr bool kIsBuiltFor[] = {MOK_INSTRUCTION_SETS(MOK_IS_BUILT_FOR) false};

}  // namespace mok::host
